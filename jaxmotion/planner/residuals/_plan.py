"""Plan of a memory budget: each residual's action, with reasons."""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

from jaxmotion import codecs, core, perfmodel
from jaxmotion.planner import _text
from jaxmotion.planner.residuals import _recipe


class BudgetTooSmallError(ValueError):
  """No plan meets the memory budget; `least_bytes` says what can be met.

  Args:
    budget_bytes: budget that was asked for.
    least_bytes: least bytes of all plans that were tried.
    source: where these are from: "predicted", or "compiled for cpu".

  Example:
    >>> raise BudgetTooSmallError(10**6, 2 * 10**6, "compiled for cpu")
    Traceback (most recent call last):
    ...
    jaxmotion.planner.BudgetTooSmallError: `budget_bytes` must be at least \
2 MB (2000000 bytes, compiled for cpu), got 1 MB. Raise the budget, shrink \
`batch`, or allow more `options`. With `measure_memory=None`, bytes are those \
predicted for `platform`.
  """

  def __init__(self, budget_bytes: float, least_bytes: int, source: str):
    size = _text.format_bytes
    hint = ""
    if source.startswith("compiled"):
      hint = (
        " With `measure_memory=None`, bytes are those predicted for `platform`."
      )
    super().__init__(
      f"`budget_bytes` must be at least {size(least_bytes)} ({least_bytes} "
      f"bytes, {source}), got {size(budget_bytes)}. Raise the budget, shrink "
      f"`batch`, or allow more `options`.{hint}"
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
  codec: codecs.Codec | None
  full_bytes: int
  device_bytes: int
  host_bytes: int
  seconds: float
  reason: str


class StockStep(NamedTuple):
  """A step that changes nothing, or that is under `jax.checkpoint`.

  Attributes:
    name: "plain", or the call of `jax.checkpoint`.
    step_s: seconds of the step, predicted.
    device_bytes: bytes of everything on the device.
    fits: whether these are within the budget.
    is_compiled: whether the compiler stated the bytes; else they are predicted.
  """

  name: str
  step_s: float
  device_bytes: int
  fits: bool
  is_compiled: bool


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class MemoryPlan:
  """The way to save a function's residuals; `wrap` applies it.

  All seconds are predicted, and so are all bytes but `compiled_bytes` and
  those of some steps of `stock`.

  Args:
    recipe: how residuals are saved.
    device: device that times are predicted for.
    rows: one row for each residual, if `compress_residuals` saves them.
    argument_count: number of arguments; all stay in memory for the whole step.
    budget_bytes: budget that was asked for.
    predicted_bytes: bytes of everything on the device.
    compiled_bytes: likewise, by the compiler; None if it was not compiled.
    source: words for that compiler: "compiled for cpu".
    argument_bytes: bytes of parameters and batch.
    gradient_bytes: bytes of the gradients and the result.
    state_bytes: bytes of the optimizer's state on the device.
    baseline_s: seconds of a step that saves what JAX saves.
    step_s: seconds of a step by this plan.
    stock: the plain step and each policy of `jax.checkpoint`, the fastest
      first.
    notes: sentences about how the plan was made.

  Example:
    >>> import jax, jax.numpy as jnp
    >>> from jaxmotion import perfmodel, planner
    >>> w = jax.ShapeDtypeStruct((64, 64), "float32")
    >>> plan = planner.fit_memory(
    ...   lambda w, x: jnp.mean(jnp.tanh(x @ w)),
    ...   w,
    ...   (w,),
    ...   perfmodel.builtin_platform("h100_node"),
    ...   budget_bytes=1e6,
    ...   measure_memory=None,
    ... )
    >>> plan.predicted_bytes <= 1e6, plan.added_s <= 0
    (True, True)
  """

  recipe: _recipe.Recipe
  device: perfmodel.Device
  rows: tuple[MemoryPlanRow, ...]
  argument_count: int
  budget_bytes: float
  predicted_bytes: int
  compiled_bytes: int | None
  source: str
  argument_bytes: int
  gradient_bytes: int
  state_bytes: int
  baseline_s: float
  step_s: float
  stock: tuple[StockStep, ...] = ()
  notes: tuple[str, ...] = ()

  def wrap(self, fn: Callable[..., Any]) -> Callable[..., Any]:
    """Returns the function that saves its residuals by this plan.

    Args:
      fn: the function that the plan is for.
    """
    return self.recipe.wrap(fn, self.argument_count, self.device)

  @property
  def name(self) -> str:
    """Words for the plan: "plain", or the call that wraps the function."""
    return self.recipe.name

  @property
  def rules(self) -> _recipe.Rules:
    """Rules of `compress_residuals`; () if the plan has none."""
    return self.recipe.rules

  @property
  def memory_budget(self) -> float | None:
    """The share that is the `memory_budget` of `compress_residuals`."""
    return self.recipe.memory_budget

  @property
  def host_bytes(self) -> int:
    """Bytes of all residuals on the host."""
    return sum(row.host_bytes for row in self.rows)

  @property
  def added_s(self) -> float:
    """Seconds that the plan adds to a step; negative if it is faster."""
    return self.step_s - self.baseline_s

  @property
  def fastest_stock(self) -> StockStep | None:
    """The fastest step of `stock` that fits; None if none does."""
    return next((s for s in self.stock if s.fits), None)

  def __str__(self) -> str:
    parts = [self._format_summary(), self._format_stock(), *self.notes]
    if self.rows:
      head = "residual action full device host seconds reason".split()
      parts += ["", core.text_table([head, *map(_format_cells, self.rows)])]
    return "\n".join(parts)

  def _format_summary(self) -> str:
    """Says what the plan is, and what it takes in bytes and seconds."""
    size, seconds = _text.format_bytes, _text.format_seconds
    compiled = "not compiled"
    if self.compiled_bytes is not None:
      compiled = f"{size(self.compiled_bytes)} {self.source}"
    comparison = "more" if self.added_s >= 0 else "less"
    state = ""
    if self.state_bytes:
      state = f"{size(self.state_bytes)} of optimizer state, "
    fixed = self.argument_bytes + self.gradient_bytes + self.state_bytes
    others = max(self.predicted_bytes - fixed, 0)
    return (
      f"{self.name}: predicted {size(self.predicted_bytes)} of "
      f"{size(self.budget_bytes)}, {compiled}: {size(self.argument_bytes)} of "
      f"arguments, {size(self.gradient_bytes)} of gradients, {state}"
      f"{size(others)} of residuals and temporaries; {seconds(self.step_s)} a "
      f"step, {seconds(abs(self.added_s))} {comparison} than plain."
    )

  def _format_stock(self) -> str:
    """Says which policy of `jax.checkpoint` comes nearest to the plan."""
    stock = self.fastest_stock
    if stock is None:
      return "Neither the plain step nor a policy of jax.checkpoint fits."
    if stock.name == self.name:
      return "Of all that fits, no other is faster."
    share = 100 * (stock.step_s / self.step_s - 1)
    return (
      f"The fastest of jax.checkpoint that fits, {stock.name}, takes "
      f"{_text.format_seconds(stock.step_s)}, {share:.3g} % more, and "
      f"{_text.format_bytes(stock.device_bytes)}, "
      f"{self.source if stock.is_compiled else 'predicted'}."
    )


def _format_cells(row: MemoryPlanRow) -> tuple[str, ...]:
  name, action, codec, *sizes, seconds, reason = row
  if codec is not None:
    action = f"{action} {_text.format_codec(codec)}"
  cells = map(_text.format_bytes, sizes)
  return (name, action, *cells, _text.format_seconds(seconds), reason)
