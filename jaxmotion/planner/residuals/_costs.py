"""What it takes to keep each residual in each way."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxmotion.codecs import Codec, zero_value
from jaxmotion.core import PyTree, tree_bytes
from jaxmotion.memory.residuals import (
  Action,
  Residual,
  ResidualChoice,
  ResidualRules,
  compress_residuals,
  offload,
  recompute,
  residuals_of,
)
from jaxmotion.perfmodel import Platform, predict_cost, predict_seconds
from jaxmotion.perfmodel.extend import decode_seconds, encode_seconds
from jaxmotion.planner.residuals._layers import layers_of, prefix_of

# Patterns of the names of what is computed again.
Drops = frozenset[str]


class TracedVariant(NamedTuple):
  """The function with something computed again, and nothing encoded.

  Attributes:
    rows: what is kept.
    movable: names of what anything may be done with.
    step_s: seconds of a step.
    peak_bytes: of all arrays that are alive at once.
  """

  rows: tuple[Residual, ...]
  movable: frozenset[str]
  step_s: float
  peak_bytes: int

  @property
  def nbytes(self) -> int:
    """Of all that is kept."""
    return sum(r.encoded_bytes * r.repeats for r in self.rows)


class KeepOption(NamedTuple):
  """One way to keep the residuals of a name.

  Attributes:
    action: a codec, `offload` or None.
    device_bytes: that stay on the device.
    device_s: seconds of encoding and decoding, and of the device's memory for
      what leaves it and comes back.
    put_s: seconds of the link to the host.
    fetch_s: seconds of the way back.
  """

  action: Action
  device_bytes: int
  device_s: float
  put_s: float
  fetch_s: float


class ResidualCosts:
  """What a function's residuals take, on a platform.

  Args:
    fn: the function.
    args: its arguments.
    platform: what it runs on.
    options: codecs and `offload`s that may be chosen.
  """

  def __init__(
    self,
    fn: Callable[..., Any],
    args: Sequence[PyTree],
    platform: Platform,
    options: Sequence[Action],
  ):
    self._fn, self.args, self._platform = fn, args, platform
    self._options = options
    self.params = tuple(range(len(args)))
    self._trials: dict[Drops, TracedVariant] = {}
    self._offers: dict[tuple[Residual, ...], list[KeepOption]] = {}
    self.argument_bytes = tree_bytes(args)
    step = jax.value_and_grad(fn)
    self.gradient_bytes = tree_bytes(jax.eval_shape(step, *args))
    self.plain_s = predict_seconds(
      predict_cost(step, *args, while_trips=1), platform.device
    )
    self._layers = layers_of(fn, args, platform.device)
    forward_s = sum(layer.forward_s for layer in self._layers)
    self._backward = max(self.plain_s / forward_s - 1, 0) if forward_s else 0

  @property
  def working_bytes(self) -> int:
    """Of what is alive besides arguments, gradients and residuals."""
    whole = self.trial()
    known = self.argument_bytes + self.gradient_bytes + whole.nbytes
    of_layers = (layer.working_bytes for layer in self._layers)
    return max(whole.peak_bytes - known, *of_layers)

  @property
  def traces(self) -> int:
    """Trials so far."""
    return len(self._trials)

  def trial(self, drops: Iterable[str] = ()) -> TracedVariant:
    """Returns the function with what matches one of the patterns dropped."""
    drops = frozenset(drops)
    if drops not in self._trials:
      self._trials[drops] = self._try(drops)
    return self._trials[drops]

  def _try(self, drops: Drops) -> TracedVariant:
    movable: set[str] = set()

    def choose(residual: Residual) -> Action:
      movable.add(residual.name)
      return recompute() if dropped(residual.name, drops) else None

    rows, wrapped = self.kept(choose), self.wrap(choose)
    whole = predict_cost(jax.value_and_grad(wrapped), *self.args, while_trips=1)
    step_s = predict_seconds(whole, self._platform.device)
    movable &= {r.name for r in rows}
    return TracedVariant(
      tuple(rows), frozenset(movable), step_s, whole.peak_bytes
    )

  def kept(self, rules: ResidualRules | ResidualChoice) -> list[Residual]:
    """Returns what is kept by such rules."""
    return residuals_of(self._fn, *self.args, codec=rules, params=self.params)

  def wrap(self, rules: ResidualRules | ResidualChoice) -> Callable[..., Any]:
    """Returns the function by such rules."""
    return compress_residuals(self._fn, rules, params=self.params)

  def offers(self, rows: Sequence[Residual]) -> list[KeepOption]:
    """Returns the ways to keep residuals of one name; the first is as is."""
    key = tuple(rows)
    if key not in self._offers:
      ways = [None, *(a for a in self._options if _suits(a, rows))]
      self._offers[key] = [self._offer(rows, action) for action in ways]
    return self._offers[key]

  def _offer(self, rows: Sequence[Residual], action: Action) -> KeepOption:
    host = isinstance(action, offload)
    codec: Any = action.codec if isinstance(action, offload) else action
    kept = [r._replace(codec=codec, on_host=host) for r in rows]
    return self.offered(kept)._replace(action=action)

  def offered(self, rows: Sequence[Residual]) -> KeepOption:
    """Returns what residuals take as they are kept."""
    to_host, from_host = self._platform.to_host, self._platform.from_host
    moved = [r for r in rows if r.on_host]
    passes = 2 * sum(r.encoded_bytes * r.repeats for r in moved)
    memory_s = passes / self._platform.device.memory_rate.bytes_per_s
    return KeepOption(
      None,
      sum(r.encoded_bytes * r.repeats for r in rows if not r.on_host),
      sum(map(self._coding_s, rows)) + memory_s,
      sum(r.repeats * to_host.transfer_seconds(r.encoded_bytes) for r in moved),
      sum(
        r.repeats * from_host.transfer_seconds(r.encoded_bytes) for r in moved
      ),
    )

  def _coding_s(self, residual: Residual) -> float:
    """Seconds of encoding and decoding, in all steps of a loop."""
    codec, device = residual.codec, self._platform.device
    if codec is None:
      return 0.0
    size = residual.like.size
    once = encode_seconds(codec, size, device)
    return residual.repeats * (once + decode_seconds(codec, size, 1, device))

  def exposed_s(self, prefix: str, put_s: Any, fetch_s: Any) -> Any:
    """Seconds of a layer's link that its computing does not hide."""
    own = (x.forward_s for x in self._layers if x.prefix == prefix)
    forward_s = next(own, 0.0)
    there = np.maximum(0.0, put_s - forward_s)
    return there + np.maximum(0.0, fetch_s - self._backward * forward_s)

  def step_s(self, drops: Drops, rows: Sequence[Residual]) -> float:
    """Seconds of a step that keeps these rows."""
    total = self.trial(drops).step_s
    for prefix in sorted({prefix_of(r.name) for r in rows}):
      own = [r for r in rows if prefix_of(r.name) == prefix]
      all_of = self.offered(own)
      total += all_of.device_s
      total += float(self.exposed_s(prefix, all_of.put_s, all_of.fetch_s))
    return total


def dropped(name: str, drops: Drops) -> bool:
  """Says whether a residual of that name is computed again."""
  return any(re.search(pattern, name) for pattern in drops)


def _suits(action: Action, rows: Sequence[Residual]) -> bool:
  inner: Any = action.codec if isinstance(action, offload) else action
  return inner is None or all(_takes(inner, r) for r in rows)


def _takes(codec: Codec, residual: Residual) -> bool:
  """Whether a codec is for such a residual and makes it smaller.

  Raises:
    ValueError: it remembers something between arrays.
  """
  if not residual.is_float:
    return False
  if isinstance(codec, zero_value) and residual.kind != "sparse":
    return False
  if jax.tree.leaves(jax.eval_shape(codec.init, residual.like)):
    raise ValueError(
      "`options` must have codecs that remember nothing between arrays, got "
      f"{codec!r}."
    )
  try:
    nbytes = residual._replace(codec=codec).encoded_bytes
  except TypeError:
    return False
  return nbytes < residual.nbytes
