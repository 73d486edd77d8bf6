"""Predicts seconds and bytes of a training step, traced once for each recipe.

Every recipe is priced in the same way: the step, `jax.value_and_grad` of the
wrapped function, is traced, and the performance model counts what it does.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax

from jaxmotion import core, perfmodel
from jaxmotion.core import PyTree
from jaxmotion.memory import residuals
from jaxmotion.planner import _text
from jaxmotion.planner.residuals import _costs, _recipe

Report = Callable[[str], object]


class Price(NamedTuple):
  """Predicted seconds of a step, and bytes of everything on the device."""

  step_s: float
  device_bytes: float


class StepPrices:
  """Prices of a function's training step by each recipe.

  The function itself is traced once; what it traces to is traced again for
  each recipe.
  """

  def __init__(
    self,
    fn: Callable[..., Any],
    args: Sequence[PyTree],
    platform: perfmodel.Platform,
    has_aux: bool = False,
    state_bytes: int = 0,
  ):
    self.args, self.platform = tuple(args), platform
    # Says what is tried.
    self.report: Report = lambda line: None
    self.state_bytes = state_bytes
    self._fn, self._has_aux = fn, has_aux
    closed, shape = jax.make_jaxpr(fn, return_shape=True)(*args)
    self._closed, self._result = closed, jax.tree.structure(shape)
    self._prices: dict[_recipe.Recipe, Price | None] = {}
    self._residuals: dict[_recipe.Recipe, list[residuals.Residual]] = {}
    self.argument_bytes = core.tree_bytes(args)
    step = self.make_step(_recipe.PLAIN, self._traced)
    self.gradient_bytes = core.tree_bytes(jax.eval_shape(step, *args))

  @functools.cached_property
  def landmarks(self) -> _recipe.Landmarks:
    """Names and loops of the function."""
    return _recipe.find_landmarks(self._closed)

  @functools.cached_property
  def costs(self) -> _costs.ResidualCosts:
    """Costs of keeping each residual in each way."""
    plain = self.price(_recipe.PLAIN)
    assert plain is not None
    return _costs.ResidualCosts(self._closed, self.platform, plain.step_s)

  def make_step(
    self, recipe: _recipe.Recipe, fn: Callable[..., Any] | None = None
  ) -> Callable[..., Any]:
    """Returns the step of a function, or of the caller's, by a recipe."""
    device = self.platform.device
    wrapped = recipe.wrap(fn or self._fn, len(self.args), device)
    return jax.value_and_grad(wrapped, has_aux=self._has_aux)

  def price(self, recipe: _recipe.Recipe) -> Price | None:
    """Returns the price of a recipe; None if it does not fit the function."""
    if recipe not in self._prices:
      price = self._find_price(recipe)
      known = {(r.kind, p) for r, p in self._prices.items()}
      self._prices[recipe] = price
      if price is not None and (recipe.kind, price) not in known:
        self.report(
          f"predicted: {recipe.name}: {_text.format_seconds(price.step_s)} a "
          f"step, {_text.format_bytes(price.device_bytes)}"
        )
    return self._prices[recipe]

  def list_residuals(self, recipe: _recipe.Recipe) -> list[residuals.Residual]:
    """Returns the residuals that a recipe saves; [] unless it is a cut."""
    if recipe not in self._residuals:
      self._residuals[recipe] = recipe.list_residuals(
        self._traced, self.args, self.platform.device
      )
    return self._residuals[recipe]

  def _find_price(self, recipe: _recipe.Recipe) -> Price | None:
    """Traces the step of a recipe and prices it; None if a rule fails."""
    step = self.make_step(recipe, self._traced)
    try:
      cost = perfmodel.predict_cost(step, *self.args, while_trips=1)
    except ValueError:
      if recipe.rules:
        return None  # A rule may match no residual.
      raise
    seconds = perfmodel.predict_seconds(cost, self.platform.device)
    if recipe.has_offload:
      seconds += self.costs.transfer_seconds(self.list_residuals(recipe))
    if recipe.is_on_host:
      jaxpr = jax.make_jaxpr(step)(*self.args)
      seconds += self.costs.stock_seconds(_costs.count_host_bytes(jaxpr))
    return Price(seconds, cost.peak_bytes + self.state_bytes)

  def _traced(self, *args: PyTree) -> Any:
    """Runs the jaxpr of the function, which is traced once."""
    outs = core.jax_core.jaxpr_as_fun(self._closed)(*jax.tree.leaves(args))
    return jax.tree.unflatten(self._result, outs)
