"""Plan of a memory budget: each residual's action, with reasons."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

from jaxmotion.codecs import Codec
from jaxmotion.core import text_table
from jaxmotion.memory.residuals import Action, compress_residuals
from jaxmotion.planner._text import format_bytes, format_codec, format_seconds


class BudgetTooSmallError(ValueError):
  """No plan meets the memory budget; `least_bytes` says what can be met.

  Args:
    budget_bytes: budget that was asked for.
    least_bytes: least bytes of all plans that were tried.
    is_compiled: whether these are the compiler's bytes, or predicted ones.

  Example:
    >>> raise BudgetTooSmallError(10**6, 2 * 10**6, True)
    Traceback (most recent call last):
    ...
    jaxmotion.planner.BudgetTooSmallError: `budget_bytes` must be at least \
2000000 (compiled), got 1000000. Raise the budget, shrink `batch`, or allow \
more `options`.
  """

  def __init__(self, budget_bytes: float, least_bytes: int, is_compiled: bool):
    source = "compiled" if is_compiled else "predicted"
    super().__init__(
      f"`budget_bytes` must be at least {least_bytes} ({source}), got "
      f"{budget_bytes}. Raise the budget, shrink `batch`, or allow more "
      "`options`."
    )
    self.budget_bytes, self.least_bytes = budget_bytes, least_bytes


class MemoryPlanRow(NamedTuple):
  """The action of one residual, its costs and a reason.

  Bytes and seconds are those of all iterations of a loop.

  Args:
    name: name of the residual ("dense/scan_0/tanh_0").
    action: "keep", "compress", "offload" or "recompute".
    codec: codec of the residual; None keeps arrays unchanged, masks as bits.
    full_bytes: bytes of the arrays themselves.
    device_bytes: bytes that stay on the device.
    host_bytes: bytes that go to the host.
    seconds: seconds that the action adds to a step, predicted.
    reason: one sentence.

  Example:
    >>> row = MemoryPlanRow("a", "keep", None, 8192, 8192, 0, 0.0, "It fits.")
    >>> row.action
    'keep'
  """

  name: str
  action: str
  codec: Codec | None
  full_bytes: int
  device_bytes: int
  host_bytes: int
  seconds: float
  reason: str


@dataclasses.dataclass(frozen=True, eq=False)
class MemoryPlan:
  """Actions for a function's residuals; `wrap` applies them.

  All seconds are predicted, and so are all bytes but `compiled_bytes`.

  Args:
    rules: pairs of a pattern and an action, for `compress_residuals`.
    rows: one row for each residual.
    params: positions of arguments that stay in memory for the whole step: all.
    budget_bytes: budget that was asked for.
    compiled_bytes: bytes of the compiled step; None if it was not compiled.
    argument_bytes: bytes of parameters and batch.
    gradient_bytes: bytes of the gradients and the result.
    temporary_bytes: bytes of all other buffers of the step.
    baseline_s: seconds of a step that saves what JAX saves.
    step_s: seconds of a step by this plan.
    notes: sentences about how the plan was made.

  Example:
    >>> plan = MemoryPlan((), (), (0,), 1e6, None, 500, 400, 100, 2e-3, 2.5e-3)
    >>> print(plan)
    Predicted 1 kB of 1 MB, not compiled: 500 B of arguments, 400 B of \
gradients, 0 B of residuals, 100 B of temporaries; 2.5 ms a step, 500 us more \
than without.
    <BLANKLINE>
    residual  action  full  device  host  seconds  reason
  """

  rules: tuple[tuple[str, Action], ...]
  rows: tuple[MemoryPlanRow, ...]
  params: tuple[int, ...]
  budget_bytes: float
  compiled_bytes: int | None
  argument_bytes: int
  gradient_bytes: int
  temporary_bytes: int
  baseline_s: float
  step_s: float
  notes: tuple[str, ...] = ()

  def wrap(self, fn: Callable[..., Any]) -> Callable[..., Any]:
    """Returns the function that saves its residuals by this plan.

    Args:
      fn: the function that the plan is for.
    """
    return compress_residuals(fn, self.rules, params=self.params)

  @property
  def residual_bytes(self) -> int:
    """Bytes of all residuals on the device."""
    return sum(row.device_bytes for row in self.rows)

  @property
  def host_bytes(self) -> int:
    """Bytes of all residuals on the host."""
    return sum(row.host_bytes for row in self.rows)

  @property
  def predicted_bytes(self) -> int:
    """Predicted bytes of everything on the device."""
    fixed = self.argument_bytes + self.gradient_bytes + self.temporary_bytes
    return fixed + self.residual_bytes

  @property
  def added_s(self) -> float:
    """Seconds that the plan adds to a step; negative if it is faster."""
    return self.step_s - self.baseline_s

  def __str__(self) -> str:
    head = ("residual", "action", "full", "device", "host", "seconds", "reason")
    table = text_table([head, *map(_format_cells, self.rows)])
    return "\n".join([self._format_summary(), *self.notes, "", table])

  def _format_summary(self) -> str:
    compiled = "not compiled"
    if self.compiled_bytes is not None:
      compiled = f"{format_bytes(self.compiled_bytes)} compiled"
    comparison = "more" if self.added_s >= 0 else "less"
    return (
      f"Predicted {format_bytes(self.predicted_bytes)} of "
      f"{format_bytes(self.budget_bytes)}, {compiled}: "
      f"{format_bytes(self.argument_bytes)} of arguments, "
      f"{format_bytes(self.gradient_bytes)} of gradients, "
      f"{format_bytes(self.residual_bytes)} of residuals, "
      f"{format_bytes(self.temporary_bytes)} of temporaries; "
      f"{format_seconds(self.step_s)} a step, "
      f"{format_seconds(abs(self.added_s))} {comparison} than without."
    )


def _format_cells(row: MemoryPlanRow) -> tuple[str, ...]:
  action = row.action
  if row.codec is not None:
    action = f"{action} {format_codec(row.codec)}"
  sizes = (row.full_bytes, row.device_bytes, row.host_bytes)
  seconds = format_seconds(row.seconds)
  return (row.name, action, *map(format_bytes, sizes), seconds, row.reason)
