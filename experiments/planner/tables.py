"""Tables of an exchange plan: its tensors, and its time beside one codec."""

from experiments.common.tables import Table
from experiments.planner.rows import list_step_times
from jaxmotion import planner


def tensor_table(plan: planner.ExchangePlan) -> Table:
  """Returns codec, bytes, error and reason of each tensor.

  Args:
    plan: made by `run.make_plan`.
  """
  lines = [
    (
      c.path,
      planner.format_codec(c.codec),
      c.method,
      f"{c.wire_bytes:,.0f}",
      f"{c.error:.2g}",
      c.reason,
    )
    for c in plan.choices
  ]
  return Table(
    ("tensor", "codec", "method", "bytes/step", "error", "reason"),
    lines,
    title="Tensors",
    text_columns=(0, 1, 2, 5),
  )


def codec_table(plan: planner.ExchangePlan) -> Table:
  """Returns the step time of the plan, and of each codec for all tensors.

  Args:
    plan: made by `run.make_plan`.
  """
  lines = [
    (
      case,
      f"{1e3 * seconds:.4g}",
      f"{plan.uncompressed.total_s / seconds:.2f}",
    )
    for case, seconds in list_step_times(plan).items()
  ]
  return Table(
    ("codec", "step, ms", "speedup"),
    lines,
    title="The plan, and one codec for all tensors",
    caption="Predicted. A codec alone may not fit in the budget.",
  )
