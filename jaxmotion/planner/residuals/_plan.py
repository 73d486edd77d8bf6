"""What is done with each residual of a function, and what that takes."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

from jaxmotion.codecs import Codec
from jaxmotion.memory.residuals import Action, compress_residuals
from jaxmotion.planner._text import format_bytes, format_codec, format_seconds


class BudgetTooSmallError(ValueError):
  """No plan meets the budget.

  Args:
    budget_bytes: what was asked for.
    least_bytes: the least that was found.
    compiled: whether that is the compiler's figure or predicted.

  Example:
    >>> raise BudgetTooSmallError(10**6, 2 * 10**6, True)
    Traceback (most recent call last):
    ...
    jaxmotion.planner.BudgetTooSmallError: `budget_bytes` is 1000000: does \
not fit; the least this can reach is 2000000 bytes (compiled).
  """

  def __init__(self, budget_bytes: float, least_bytes: int, compiled: bool):
    source = "compiled" if compiled else "predicted"
    super().__init__(
      f"`budget_bytes` is {budget_bytes}: does not fit; the least this can "
      f"reach is {least_bytes} bytes ({source})."
    )
    self.budget_bytes, self.least_bytes = budget_bytes, least_bytes


class MemoryPlanRow(NamedTuple):
  """What a plan does with one residual.

  Args:
    name: of the residual ("dense/scan_0/tanh_0").
    action: "keep", "compress", "offload" or "recompute".
    codec: what it is encoded by; None as it is, masks as bits.
    plain_bytes: of the arrays, of all steps of a loop.
    kept_bytes: of them that stay on the device.
    host_bytes: of them that go to the host.
    seconds: that the action adds to a step, predicted.
    reason: one sentence.

  Example:
    >>> row = MemoryPlanRow("a", "keep", None, 8192, 8192, 0, 0.0, "It fits.")
    >>> row.action
    'keep'
  """

  name: str
  action: str
  codec: Codec | None
  plain_bytes: int
  kept_bytes: int
  host_bytes: int
  seconds: float
  reason: str


@dataclasses.dataclass(frozen=True, eq=False)
class MemoryPlan:
  """What is done with each residual; `wrap` does it.

  All seconds are predicted, and so are all bytes but `compiled_bytes`.

  Args:
    rules: pairs of a pattern and an action, of `compress_residuals`.
    rows: one for each residual.
    params: positions of arguments that are there anyway: all.
    budget_bytes: what was asked for.
    compiled_bytes: of the compiled step; None if it was not compiled.
    argument_bytes: of parameters and batch.
    gradient_bytes: of the gradients, and the result.
    working_bytes: of what is alive besides.
    plain_s: seconds of a step that keeps what JAX keeps.
    step_s: seconds of a step by this plan.
    notes: what there is to know about how it was made.

  Example:
    >>> plan = MemoryPlan((), (), (0,), 1e6, None, 500, 400, 100, 2e-3, 2.5e-3)
    >>> print(plan)
    Predicted 1 kB of 1 MB, not compiled: 500 B of arguments, 400 B of \
gradients, 0 B of residuals, 100 B at work; 2.5 ms a step, 500 us more than \
without.
    <BLANKLINE>
    residual  action  plain  kept  host  seconds  reason
  """

  rules: tuple[tuple[str, Action], ...]
  rows: tuple[MemoryPlanRow, ...]
  params: tuple[int, ...]
  budget_bytes: float
  compiled_bytes: int | None
  argument_bytes: int
  gradient_bytes: int
  working_bytes: int
  plain_s: float
  step_s: float
  notes: tuple[str, ...] = ()

  def wrap(self, fn: Callable[..., Any]) -> Callable[..., Any]:
    """Returns the function that keeps its residuals by this plan.

    Args:
      fn: the function that the plan is for.
    """
    return compress_residuals(fn, self.rules, params=self.params)

  @property
  def residual_bytes(self) -> int:
    """Of all residuals, as they are kept on the device."""
    return sum(row.kept_bytes for row in self.rows)

  @property
  def host_bytes(self) -> int:
    """Of all residuals that go to the host."""
    return sum(row.host_bytes for row in self.rows)

  @property
  def predicted_bytes(self) -> int:
    """Of everything on the device."""
    fixed = self.argument_bytes + self.gradient_bytes + self.working_bytes
    return fixed + self.residual_bytes

  @property
  def added_s(self) -> float:
    """Seconds that the plan adds to a step; less than 0: it is faster."""
    return self.step_s - self.plain_s

  def __str__(self) -> str:
    lines = [self._summary(), *self.notes, "", *self._table()]
    return "\n".join(lines)

  def _summary(self) -> str:
    compiled = self.compiled_bytes
    checked = "not compiled" if compiled is None else format_bytes(compiled)
    checked += "" if compiled is None else " compiled"
    word = "more" if self.added_s >= 0 else "less"
    return (
      f"Predicted {format_bytes(self.predicted_bytes)} of "
      f"{format_bytes(self.budget_bytes)}, {checked}: "
      f"{format_bytes(self.argument_bytes)} of arguments, "
      f"{format_bytes(self.gradient_bytes)} of gradients, "
      f"{format_bytes(self.residual_bytes)} of residuals, "
      f"{format_bytes(self.working_bytes)} at work; "
      f"{format_seconds(self.step_s)} a step, "
      f"{format_seconds(abs(self.added_s))} {word} than without."
    )

  def _table(self) -> list[str]:
    head = ("residual", "action", "plain", "kept", "host", "seconds", "reason")
    rows = [head, *map(_cells, self.rows)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
      "  ".join(
        cell.ljust(width) for cell, width in zip(row, widths, strict=True)
      ).rstrip()
      for row in rows
    ]


def _cells(row: MemoryPlanRow) -> tuple[str, ...]:
  does = (
    row.action
    if row.codec is None
    else f"{row.action} {format_codec(row.codec)}"
  )
  sizes = (row.plain_bytes, row.kept_bytes, row.host_bytes)
  took = format_seconds(row.seconds)
  return (row.name, does, *map(format_bytes, sizes), took, row.reason)
