"""Lists recipes to choose from, and prices them.

1. The plain function, each policy of `jax.checkpoint`, and the default cut. The
   others are priced only if the plain function does not fit (`extend`).
2. Policies of names, and minimum cuts of several budgets. Between a cut that is
   too large and one that fits, further budgets are tried (`refine`).
3. Cuts that recompute a single residual, or save single names.
4. Cuts whose residuals are all encoded, or all on the host.
5. Cuts that keep each residual in its own way. Costs of keeping residuals add
   up, so for one budget the Pareto front of (seconds, bytes) is combined
   residual by residual. These sums are estimates: a recipe is traced before
   it is chosen.
"""

import math
import re
import time
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxmotion.memory import residuals
from jaxmotion.planner import _text
from jaxmotion.planner.residuals import _costs, _prices, _recipe

# Shares of the residuals' bytes. None recomputes what is nearly free.
_SHARES = (1.0, 0.5, 0.25, 0.1, 0.0)
_CODED_SHARES = (None, 0.5, 0.25, 0.1)
_MIXED_SHARES = (None, 0.4, 0.15)
# Residuals that are recomputed alone, and names that are saved alone.
_MOST_SINGLES = 6
# A share of a step's seconds for which nothing is changed.
_PLAIN_SHARE = 0.01
# Budgets that are tried between two neighbors.
_REFINEMENTS = 4
# Larger fronts are thinned out.
_MAX_SIZE = 128


class Candidate(NamedTuple):
  """A recipe and its price.

  Attributes:
    is_estimate: whether costs are sums over residuals, not yet traced.
  """

  recipe: _recipe.Recipe
  step_s: float
  device_bytes: float
  is_estimate: bool = False


class RecipeSearch:
  """Recipes of a function, priced."""

  def __init__(
    self,
    prices: _prices.StepPrices,
    actions: Sequence[residuals.Action],
    may_recompute: bool,
  ):
    self.prices = prices
    self._actions, self._may_recompute = actions, may_recompute
    self._end_s = math.inf
    self._found: dict[_recipe.Recipe, Candidate] = {}
    self._is_extended = False

  def begin(
    self,
    report: _prices.Report = lambda line: None,
    time_limit_s: float | None = None,
  ) -> None:
    """Prices the first recipes, unless an earlier search did."""
    # `time_limit_s`: seconds after which no further recipe is priced, but for
    # the first ones.
    limit_s = math.inf if time_limit_s is None else time_limit_s
    self._end_s = time.monotonic() + limit_s
    self.prices.report = report
    if self._found:
      report(f"{len(self._found)} plans are priced already")
    self._add(_recipe.PLAIN)
    # Its errors say what no way of saving residuals allows.
    self._add(_recipe.make_cut(None if self._may_recompute else 1.0))
    if self._may_recompute:
      for recipe in _recipe.list_stock_recipes(self.prices.landmarks):
        self._add(recipe)

  @property
  def is_over(self) -> bool:
    """Whether the time limit is over."""
    return time.monotonic() > self._end_s

  def extend(self) -> None:
    """Prices all other recipes, if that was not done yet."""
    if self._is_extended:
      return
    for recipe in self._list_others():
      if self.is_over:
        return
      self._add(recipe)
    for share in _MIXED_SHARES if self._actions else ():
      if self.is_over:
        return
      for candidate in self._list_mixed(share if self._may_recompute else 1.0):
        self._found.setdefault(candidate.recipe, candidate)
    self._is_extended = True

  @property
  def candidates(self) -> list[Candidate]:
    """All candidates, the fastest first, and of equal ones the smallest."""

    def rank(candidate: Candidate) -> tuple[float, float]:
      # Nothing is changed for a small share of a step.
      share = _PLAIN_SHARE if candidate.recipe.kind == "plain" else 0
      return candidate.step_s * (1 - share), candidate.device_bytes

    return sorted(self._found.values(), key=rank)

  @property
  def plain(self) -> Candidate:
    """The candidate that changes nothing."""
    return self._found[_recipe.PLAIN]

  def settle(self, candidate: Candidate) -> Candidate | None:
    """Returns a candidate whose price was traced; None if it has none."""
    del self._found[candidate.recipe]
    return self._add(candidate.recipe)

  def refine(self, most_bytes: float) -> None:
    """Adds cuts of further budgets near a number of bytes."""
    if not self._is_extended:
      return
    families = {c.recipe.rules for c in self._found.values() if _has_share(c)}
    fits = [c for c in self.candidates if c.device_bytes <= most_bytes]
    best_s = fits[0].step_s if fits else float("inf")
    for rules in families:
      for _ in range(_REFINEMENTS):
        if self.is_over or not self._halve_gap(rules, most_bytes, best_s):
          break

  def _halve_gap(
    self, rules: _recipe.Rules, most_bytes: float, best_s: float
  ) -> bool:
    """Prices a budget half-way between the last that fits and the next one."""
    # A share of memory is what a recipe may keep; `rules` are all else of it.
    # It says whether there was such a recipe: another call may halve the rest.
    # Smaller shares need not fit: what is recomputed at once takes memory, too.
    family = (c for c in self._found.values() if c.recipe.rules == rules)
    shared = sorted(filter(_has_share, family), key=_share_of)
    fits = [i for i, c in enumerate(shared) if c.device_bytes <= most_bytes]
    if not fits or fits[-1] + 1 == len(shared):
      return False
    low, high = shared[fits[-1] : fits[-1] + 2]
    if high.step_s >= best_s:  # What is between is no faster than the best.
      return False
    share = (_share_of(low) + _share_of(high)) / 2
    like = high.recipe
    # Names show the rules: `compress_residuals(codec=..., memory_budget=0.5)`.
    words = like.name.partition("(")[2].partition("memory_budget")[0]
    return bool(self._add(_recipe.make_cut(share, rules, words.strip(", "))))

  def _add(self, recipe: _recipe.Recipe) -> Candidate | None:
    """Prices a recipe, unless that was done; None if it fits no residual."""
    if recipe not in self._found:
      price = self.prices.price(recipe)
      if price is None:
        return None
      self._found[recipe] = Candidate(recipe, *price)
    return self._found[recipe]

  def _list_others(self) -> Iterator[_recipe.Recipe]:
    """Yields recipes that are priced only if the plain step does not fit."""
    if self._may_recompute:
      yield from map(_recipe.make_cut, _SHARES)
      if self.prices.landmarks.has_loops or self._is_stock_smaller():
        yield from _recipe.list_name_recipes(self.prices.landmarks)
      if any(isinstance(action, residuals.offload) for action in self._actions):
        yield from _recipe.list_offload_recipes(self.prices.landmarks)
      yield from self._list_singles()
    for action in self._actions:
      for share in _CODED_SHARES if self._may_recompute else (1.0,):
        yield _recipe.make_cut(share, (("", action),), _format_action(action))

  def _is_stock_smaller(self) -> bool:
    """Returns whether a stock policy holds less than the plain function."""
    # If none does, then what is repeated is alive at the same time.
    stock = [c for c in self._found.values() if c.recipe.kind == "stock"]
    least = min(c.device_bytes for c in stock)
    return least < 0.95 * self.plain.device_bytes

  def _list_singles(self) -> Iterator[_recipe.Recipe]:
    """Yields cuts that recompute one residual, or save names alone."""
    names = self.prices.landmarks.names[:_MOST_SINGLES]
    alone = [names] if names else []
    if len(names) > 1 and not self.prices.landmarks.has_loops:
      alone += [(name,) for name in names]
    for some in alone:
      rules = tuple((f"/{re.escape(name)}$", residuals.save()) for name in some)
      words = f"names {', '.join(some)} alone"
      yield _recipe.make_cut(None, (*rules, ("", residuals.recompute())), words)
    saved = self.prices.list_residuals(_recipe.make_cut())
    sizes: dict[str, int] = {}
    for r in saved:
      sizes[r.name] = sizes.get(r.name, 0) + r.encoded_bytes * r.repeats
    for name in sorted(sizes, key=lambda n: -sizes[n])[:_MOST_SINGLES]:
      rule = (f"^{re.escape(name)}$", residuals.recompute())
      yield _recipe.make_cut(None, (rule,), f"without {name}")

  def _list_mixed(self, share: float | None) -> Iterator[Candidate]:
    """Yields the front of the ways to keep the residuals of one budget."""
    # Transfers of one layer share the time of that layer to hide in. Their
    # seconds are therefore separate costs within a layer, and become exposed
    # seconds once the layer's front is complete.
    base = _recipe.make_cut(share)
    price = self.prices.price(base)
    assert price is not None
    saved, costs = self.prices.list_residuals(base), self.prices.costs
    front, names = _NOTHING, list[str]()
    options: list[list[_costs.KeepOption]] = []
    for prefix in sorted({_costs.layer_of(r.name) for r in saved}):
      layer = _NOTHING
      own = [r for r in saved if _costs.layer_of(r.name) == prefix]
      for name in dict.fromkeys(r.name for r in own if not r.is_of_scan):
        named = [r for r in own if r.name == name]
        options.append(costs.list_options(named, self._actions))
        names.append(name)
        every = np.arange(len(options[-1]), dtype=np.int8)[:, None]
        own_costs = np.array([o[1:] for o in options[-1]], float)
        layer = layer.combine(_ParetoFront(own_costs, every))
      nbytes, device_s, *link_s = layer.costs.T
      device_s = device_s + costs.exposed_seconds(prefix, *link_s)
      exposed = np.stack([nbytes, device_s, 0 * nbytes, 0 * nbytes], axis=1)
      front = front.combine(_ParetoFront(exposed, layer.choices).prune())
    # Without an action: what every other way of the front has fewer bytes than.
    all_kept = front.costs[:, 0].max()
    for (nbytes, step_s, *_), choice in zip(
      front.costs, front.choices, strict=True
    ):
      triples = zip(names, options, choice, strict=True)
      rules = [(name, own[i].action) for name, own, i in triples if i]
      if rules:
        chosen = tuple((f"^{re.escape(name)}$", a) for name, a in rules)
        words = ", ".join(f"{name}: {_format_action(a)}" for name, a in rules)
        recipe = _recipe.make_cut(share, chosen, words)
        freed = float(all_kept - nbytes)
        yield Candidate(
          recipe, price.step_s + float(step_s), price.device_bytes - freed, True
        )


def _has_share(candidate: Candidate) -> bool:
  """Returns whether a candidate is one of a family of budgets."""
  rules = candidate.recipe.rules
  is_one_action = not rules or rules[0][0] == ""
  return candidate.recipe.memory_budget is not None and is_one_action


def _share_of(candidate: Candidate) -> float:
  """Returns the share of the residuals' bytes that a cut may keep."""
  return candidate.recipe.memory_budget or 0.0


def _format_action(action: residuals.Action) -> str:
  """Returns the expression of an action for the name of a recipe."""
  if isinstance(action, residuals.offload):
    inner = "" if action.codec is None else _text.format_codec(action.codec)
    return f"offload({inner})"
  codec: Any = action
  return _text.format_codec(codec)


class _ParetoFront(NamedTuple):
  """Ways to keep some residuals, none better than another in every cost.

  Attributes:
    costs: float64[ways, 4], bytes that stay on the device, seconds of
      everything but the links, of the link to the host, and of the link back.
    choices: int8[ways, names], the option taken for each name.
  """

  costs: np.ndarray
  choices: np.ndarray

  def combine(self, other: "_ParetoFront") -> "_ParetoFront":
    """Returns the front of all pairs of a way of this and one of another."""
    # Costs only add up, so a pair of dominated ways is dominated as well.
    costs = self.costs[:, None] + other.costs
    first = np.repeat(self.choices, len(other.costs), axis=0)
    second = np.tile(other.choices, (len(self.costs), 1))
    choices = np.concatenate([first, second], axis=1)
    return _ParetoFront(costs.reshape(-1, 4), choices).prune()

  def prune(self) -> "_ParetoFront":
    """Returns the ways that no other dominates; of too many, some."""
    order = np.lexsort(self.costs.T[::-1])
    front = order[_find_undominated(self.costs[order])]
    some = np.linspace(0, len(front) - 1, min(_MAX_SIZE, len(front)))
    thinned = front[some.astype(int)]
    return _ParetoFront(self.costs[thinned], self.choices[thinned])


_NOTHING = _ParetoFront(np.zeros((1, 4)), np.zeros((1, 0), np.int8))


def _find_undominated(costs: np.ndarray) -> np.ndarray:
  """Returns positions of undominated ways, of ways ordered by bytes."""
  # A way is dominated if one before it, which has no more bytes, costs no
  # more seconds of any kind.
  if not costs[:, 2].any():
    # One cost besides bytes: a running minimum instead of all pairs.
    least = np.minimum.accumulate(costs[:, 1])
    before = np.concatenate([[np.inf], least[:-1]])
    return np.flatnonzero(costs[:, 1] < before)
  front: list[int] = []
  for i, cost in enumerate(costs[:, 1:]):
    if not np.any(np.all(costs[front, 1:] <= cost, axis=1)):
      front.append(i)
  return np.array(front)
