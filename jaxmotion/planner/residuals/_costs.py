"""Costs of keeping each residual of a function in each possible way."""

from __future__ import annotations

import functools
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
from jaxmotion.perfmodel import (
  Link,
  Platform,
  predict_cost,
  predict_seconds,
)
from jaxmotion.perfmodel.extend import decode_seconds, encode_seconds
from jaxmotion.planner.residuals._layers import layer_of, list_layers

# Patterns of the names of recomputed residuals.
RecomputeSet = frozenset[str]


class TracedVariant(NamedTuple):
  """The function with some residuals recomputed and none encoded.

  Attributes:
    residuals: residuals that are saved.
    adjustable: names of the residuals that an action can be chosen for.
    step_s: predicted seconds of a step.
    peak_bytes: bytes of all arrays that are alive at the same time.
  """

  residuals: tuple[Residual, ...]
  adjustable: frozenset[str]
  step_s: float
  peak_bytes: int

  @property
  def residual_bytes(self) -> int:
    """Bytes of all saved residuals."""
    return sum(r.encoded_bytes * r.repeats for r in self.residuals)


class KeepOption(NamedTuple):
  """A way to keep some residuals, and its costs in a step.

  Attributes:
    action: a codec, `offload` or None.
    device_bytes: bytes that stay on the device.
    device_s: seconds of encoding and decoding, and of the device's memory for
      residuals that leave it and come back.
    to_host_s: seconds of the link to the host.
    from_host_s: seconds of the link back.
  """

  action: Action
  device_bytes: int
  device_s: float
  to_host_s: float
  from_host_s: float


class ResidualCosts:
  """Costs of a function's residuals on a platform.

  The function is traced once for each set of recomputed residuals. All other
  costs are sums over residuals.

  Args:
    fn: the function.
    args: its arguments, as ShapeDtypeStructs.
    platform: device, and links to the host.
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
    self._variants: dict[RecomputeSet, TracedVariant] = {}
    self._keep_options: dict[tuple[Residual, ...], list[KeepOption]] = {}
    self.argument_bytes = tree_bytes(args)
    step = jax.value_and_grad(fn)
    self.gradient_bytes = tree_bytes(jax.eval_shape(step, *args))
    self.baseline_s = predict_seconds(
      predict_cost(step, *args, while_trips=1), platform.device
    )
    self._layers = list_layers(fn, args, platform.device)
    forward_s = sum(layer.forward_s for layer in self._layers)
    # Backward seconds for each second of the forward pass.
    self._backward_ratio = (
      max(self.baseline_s / forward_s - 1, 0) if forward_s else 0
    )

  @functools.cached_property
  def temporary_bytes(self) -> int:
    """Bytes of buffers other than arguments, gradients and residuals."""
    base = self.trace_variant()
    known = self.argument_bytes + self.gradient_bytes + base.residual_bytes
    of_layers = (layer.temporary_bytes for layer in self._layers)
    return max(base.peak_bytes - known, *of_layers)

  @property
  def trace_count(self) -> int:
    """Number of variants traced so far."""
    return len(self._variants)

  def trace_variant(self, recomputed: Iterable[str] = ()) -> TracedVariant:
    """Returns the function with a set of residuals recomputed.

    Args:
      recomputed: patterns of the residuals' names.
    """
    recomputed = frozenset(recomputed)
    if recomputed not in self._variants:
      self._variants[recomputed] = self._trace_variant(recomputed)
    return self._variants[recomputed]

  def _trace_variant(self, recomputed: RecomputeSet) -> TracedVariant:
    adjustable: set[str] = set()

    def choose(residual: Residual) -> Action:
      adjustable.add(residual.name)
      return recompute() if is_recomputed(residual.name, recomputed) else None

    residuals = self.list_residuals(choose)
    step = jax.value_and_grad(self.wrap_function(choose))
    cost = predict_cost(step, *self.args, while_trips=1)
    return TracedVariant(
      tuple(residuals),
      frozenset(adjustable & {r.name for r in residuals}),
      predict_seconds(cost, self._platform.device),
      cost.peak_bytes,
    )

  def list_residuals(
    self, rules: ResidualRules | ResidualChoice
  ) -> list[Residual]:
    """Returns the residuals that the function saves by these rules."""
    return residuals_of(self._fn, *self.args, codec=rules, params=self.params)

  def wrap_function(
    self, rules: ResidualRules | ResidualChoice
  ) -> Callable[..., Any]:
    """Returns the function that saves its residuals by these rules."""
    return compress_residuals(self._fn, rules, params=self.params)

  def list_options(self, residuals: Sequence[Residual]) -> list[KeepOption]:
    """Returns the ways to keep residuals of one name, unchanged first."""
    key = tuple(residuals)
    if key not in self._keep_options:
      actions = [a for a in self._options if _is_applicable(a, residuals)]
      self._keep_options[key] = [
        self._cost_option(residuals, action) for action in (None, *actions)
      ]
    return self._keep_options[key]

  def _cost_option(
    self, residuals: Sequence[Residual], action: Action
  ) -> KeepOption:
    on_host = isinstance(action, offload)
    codec: Any = action.codec if isinstance(action, offload) else action
    kept = [r._replace(codec=codec, on_host=on_host) for r in residuals]
    return self.sum_costs(kept)._replace(action=action)

  def sum_costs(self, residuals: Sequence[Residual]) -> KeepOption:
    """Returns the costs of residuals by their own codecs and places."""
    moved = [r for r in residuals if r.on_host]
    # The device's memory is read on the way out and written on the way back.
    passed_bytes = 2 * sum(r.encoded_bytes * r.repeats for r in moved)
    memory_s = passed_bytes / self._platform.device.memory_rate.bytes_per_s
    return KeepOption(
      None,
      sum(r.encoded_bytes * r.repeats for r in residuals if not r.on_host),
      sum(map(self._coding_seconds, residuals)) + memory_s,
      _transfer_seconds(self._platform.to_host, moved),
      _transfer_seconds(self._platform.from_host, moved),
    )

  def _coding_seconds(self, residual: Residual) -> float:
    """Returns the seconds of encoding and decoding in all iterations."""
    codec, device = residual.codec, self._platform.device
    if codec is None:
      return 0.0
    size = residual.like.size
    encode_s = encode_seconds(codec, size, device)
    decode_s = decode_seconds(codec, size, 1, device)
    return residual.repeats * (encode_s + decode_s)

  def exposed_seconds(
    self, layer: str, to_host_s: Any, from_host_s: Any
  ) -> Any:
    """Returns the seconds of a layer's transfers that are not hidden.

    Transfers to the host hide behind the same layer's forward pass, transfers
    back behind its backward pass.

    Args:
      layer: prefix of the layer.
      to_host_s: seconds of the link to the host, a number or an array.
      from_host_s: seconds of the link back, a number or an array.
    """
    found = (x.forward_s for x in self._layers if x.prefix == layer)
    forward_s = next(found, 0.0)
    backward_s = self._backward_ratio * forward_s
    exposed = np.maximum(0.0, to_host_s - forward_s)
    return exposed + np.maximum(0.0, from_host_s - backward_s)

  def step_seconds(
    self, recomputed: RecomputeSet, residuals: Sequence[Residual]
  ) -> float:
    """Returns the seconds of a step that saves these residuals.

    Args:
      recomputed: patterns of the names of recomputed residuals.
      residuals: saved residuals, with their codecs and places.
    """
    total = self.trace_variant(recomputed).step_s
    for layer in sorted({layer_of(r.name) for r in residuals}):
      own = [r for r in residuals if layer_of(r.name) == layer]
      costs = self.sum_costs(own)
      total += costs.device_s
      total += float(
        self.exposed_seconds(layer, costs.to_host_s, costs.from_host_s)
      )
    return total


def is_recomputed(name: str, recomputed: RecomputeSet) -> bool:
  """Returns whether a residual of that name is recomputed."""
  return any(re.search(pattern, name) for pattern in recomputed)


def _is_applicable(action: Action, residuals: Sequence[Residual]) -> bool:
  codec: Any = action.codec if isinstance(action, offload) else action
  return codec is None or all(_is_smaller(codec, r) for r in residuals)


def _is_smaller(codec: Codec, residual: Residual) -> bool:
  """Returns whether a codec can encode a residual and makes it smaller."""
  if not residual.is_float:
    return False
  if isinstance(codec, zero_value) and residual.kind != "sparse":
    return False
  try:
    encoded_bytes = residual._replace(codec=codec).encoded_bytes
  except TypeError:  # The codec does not encode this dtype.
    return False
  return encoded_bytes < residual.nbytes


def _transfer_seconds(link: Link | None, moved: Sequence[Residual]) -> float:
  if link is None:  # Nothing is moved: `fit_memory` offers no `offload`.
    return 0.0
  return sum(r.repeats * link.transfer_seconds(r.encoded_bytes) for r in moved)
