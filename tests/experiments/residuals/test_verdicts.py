import jax

from experiments.common.records import Row
from experiments.models import losses
from experiments.residuals import frontier, tables

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


def test_dents_are_counted_by_their_kind():
  rows = make_rows(
    plain=(900, 1.0),
    jax_block_dots=(300, 1.1),
    jax_block_no_batch=(299, 1.2),
    jax_block_nothing=(100, 1.5),
    ours=(920, 1.1),
    ours_budget_1=(300, 1.2),
    ours_budget_0_75=(250, 1.1),
    ours_budget_0_5=(260, 1.4),
    ours_budget_0=(120, 1.5),
  )
  (points,) = tables.group_points(rows).values()
  assert frontier.count_dents(points) == frontier.Dents(
    bytes=1, flops=1, step_ms=1, stock_by_flops=1, stock_by_ms=1, above_plain=1
  )


def test_all_budgets_and_exact_policies_are_predicted():
  make_task = losses.parse_task("norm_dense:width=64:rows=64:blocks=2")
  with jax.numpy_rank_promotion("allow"):
    points = frontier.predict_points(make_task, "h100")
  budgets = [name for name in points if name.startswith("ours_budget")]
  assert budgets[0] == "ours_budget_1" and budgets[-1] == "ours_budget_0"
  assert len(budgets) == 17 and "jax_block_nothing" in points
  assert not [name for name in points if name.endswith("bits")]
