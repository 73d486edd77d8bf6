"""Choice of recomputed values that a backward pass saves once more."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from jaxmotion import program
from jaxmotion.memory.residuals import trace
from jaxmotion.memory.residuals.choose import (
  _min_cut,
  _residual,
  _residual_table,
)


def choose_cached(
  joint: trace.JointProgram,
  reads: Sequence[program.Value],
  known: Iterable[program.Value],
  table: _residual_table.ResidualTable,
) -> dict[program.Value, _residual.Residual]:
  """Chooses which recomputed values to save again until their last use."""
  # Without them each reader would recompute for itself: the exponential of a
  # transformer's attention scores was computed three times, and XLA kept the
  # scores rather than the exponential. The cut goes through values that follow
  # without another expensive step from what was recomputed, so no expensive
  # step runs more than twice in all. The values are saved exactly: they live
  # for a short time only.

  def cost(value: program.Value) -> int:
    if not hasattr(value.aval, "shape"):
      return 1
    return table.describe_exact(value).encoded_bytes

  graph = _min_cut.CutGraph(
    joint, reads, known, lambda step: program.is_expensive(step.eqn)
  )
  costs = [max(1, cost(value)) for value in graph.values]
  chosen, _ = graph.find_cut(costs, [0] * len(graph.steps))
  return {v: table.describe_exact(v) for v in chosen}
