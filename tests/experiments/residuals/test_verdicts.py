from experiments.common.records import Row
from experiments.residuals import tables

MIB = 2**20


def make_rows(**policies):
  """Rows of one model: (MiB, TFLOP) of each policy."""
  return [
    Row(
      *("residuals_compare", f"net/{policy}", metric, value, "unit"),
      *(None, None, None, "a target", "0"),
    )
    for policy, (mib, tflop) in policies.items()
    for metric, value in (
      ("temp_bytes", mib * MIB),
      ("flops", tflop * 1e12),
      ("step_ms_predicted", tflop),
      ("trace_s", 1.0),
      ("compile_s", 2.0),
    )
  ]


def test_a_stock_policy_is_below_ours_at_equal_or_more_flops_only():
  rows = make_rows(
    plain=(900, 1.0),
    jax_block_dots=(300, 1.1),
    jax_block_names=(249.8, 1.1),
    jax_block_no_batch=(200, 1.2),
    jax_block_nothing=(100, 1.5),
    ours=(250, 1.1005),
    ours_budget_0=(120, 1.4),
    ours_8bits=(50, 1.0),
  )
  (points,) = tables.group_points(rows).values()
  found = list(tables.find_losses(points))
  # Within a thousandth is equal; rounded gradients do not count.
  assert [loss.policy for loss in found] == [
    *("jax_block_no_batch", "jax_block_nothing")
  ]
  assert [loss.ours for loss in found] == [250 * MIB, 120 * MIB]
  assert tables.least_bytes(points, 1.0e12) is None
