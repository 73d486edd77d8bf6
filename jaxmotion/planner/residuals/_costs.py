"""Costs of keeping each residual of a function in each possible way."""

import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxmotion import codecs, core, perfmodel, program
from jaxmotion.memory.residuals import Action, Residual, offload
from jaxmotion.perfmodel.extend import decode_seconds, encode_seconds

# The loops in the name of a residual.
_PREFIX = re.compile(r"[a-z]+/((?:scan_\d+/)*)")


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
  """Costs of keeping a function's residuals on a platform."""

  def __init__(
    self,
    closed: core.jax_core.ClosedJaxpr,
    platform: perfmodel.Platform,
    step_s: float,
  ):
    self._platform = platform
    self._layers = list_layers(closed, platform.device)
    forward_s = sum(layer.forward_s for layer in self._layers)
    # Backward seconds for each second of the forward pass.
    self._backward_ratio = max(step_s / forward_s - 1, 0) if forward_s else 0

  def list_options(
    self, residuals: Sequence[Residual], actions: Sequence[Action]
  ) -> list[KeepOption]:
    """Returns the ways to keep residuals of one name, unchanged first."""
    options = []
    for action in (None, *actions):
      on_host = isinstance(action, offload)
      codec: Any = action.codec if isinstance(action, offload) else action
      if codec is None or all(_is_smaller(codec, r) for r in residuals):
        encoded = [r._replace(codec=codec, on_host=on_host) for r in residuals]
        options.append(self.sum_costs(encoded)._replace(action=action))
    return options

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
    self, layer: str | None, to_host_s: Any, from_host_s: Any
  ) -> Any:
    """Returns the seconds of a layer's transfers that are not hidden."""
    # Transfers to the host hide behind the same layer's forward pass, transfers
    # back behind its backward pass.
    # `layer`: prefix of a layer; None is the whole function.
    # `to_host_s`: seconds of the link to the host, a number or an array.
    # `from_host_s`: seconds of the link back, a number or an array.
    forward_s = sum(
      x.forward_s for x in self._layers if layer in (None, x.prefix)
    )
    backward_s = self._backward_ratio * forward_s
    exposed = np.maximum(0.0, to_host_s - forward_s)
    return exposed + np.maximum(0.0, from_host_s - backward_s)

  def transfer_seconds(self, residuals: Sequence[Residual]) -> float:
    """Returns the seconds of all transfers that are not hidden."""
    total = 0.0
    for layer in sorted({layer_of(r.name) for r in residuals}):
      own = [r for r in residuals if layer_of(r.name) == layer]
      costs = self.sum_costs(own)
      exposed = self.exposed_seconds(layer, costs.to_host_s, costs.from_host_s)
      total += float(exposed)
    return total

  def stock_seconds(self, host_bytes: float) -> float:
    """Returns the seconds of a policy's transfers that are not hidden."""
    to_host, from_host = self._platform.to_host, self._platform.from_host
    if to_host is None or from_host is None or not host_bytes:
      return 0.0
    times = (link.transfer_seconds(host_bytes) for link in (to_host, from_host))
    return float(self.exposed_seconds(None, *times))


def count_host_bytes(jaxpr: Any) -> int:
  """Returns the bytes that a program sends to the host, in all iterations."""
  total = 0
  for step in program.flatten(jaxpr, calls="all").steps:
    if step.name == "device_put":
      spaces = [getattr(v.aval, "memory_space", None) for v in step.outs]
      for v, space in zip(step.outs, spaces, strict=True):
        total += v.nbytes if space == jax.memory.Space.Host else 0
    runs = step.params["length"] if step.name == "scan" else 1
    total += runs * sum(map(count_host_bytes, program.inner_jaxprs(step.eqn)))
  return total


def _is_smaller(codec: codecs.Codec, residual: Residual) -> bool:
  """Returns whether a codec can encode a residual and makes it smaller."""
  if not residual.is_float:
    return False
  if isinstance(codec, codecs.zero_value) and residual.kind != "sparse":
    return False
  try:
    encoded_bytes = residual._replace(codec=codec).encoded_bytes
  except TypeError:  # The codec does not encode this dtype.
    return False
  return encoded_bytes < residual.nbytes


def _transfer_seconds(
  link: perfmodel.Link | None, moved: Sequence[Residual]
) -> float:
  """Returns the seconds of residuals on one link, one after the other."""
  if link is None:  # Nothing is moved: `fit_memory` offers no `offload`.
    return 0.0
  return sum(r.repeats * link.transfer_seconds(r.encoded_bytes) for r in moved)


class Layer(NamedTuple):
  """The body of a scan, or everything outside scans.

  Attributes:
    prefix: start of the names of the layer's residuals ("scan_0/"), without
      their kind; "" outside scans.
    forward_s: seconds of all iterations, without inner scans.
  """

  prefix: str
  forward_s: float


def layer_of(name: str) -> str:
  """Returns the prefix of a residual's layer, "" outside scans."""
  match = _PREFIX.match(name)
  return match.group(1) if match else ""


def list_layers(
  closed: core.jax_core.ClosedJaxpr,
  device: perfmodel.Device,
  prefix: str = "",
  repeats: int = 1,
) -> list[Layer]:
  """Returns the layers of a function; the first is what is outside scans."""
  inner_layers = []
  inner_s = 0.0
  steps = program.flatten(closed).steps
  for i, scan in enumerate(step for step in steps if step.name == "scan"):
    body, length = scan.params["jaxpr"], repeats * scan.params["length"]
    inner_layers += list_layers(body, device, f"{prefix}scan_{i}/", length)
    inner_s += length * _forward_seconds(body, device)
  own_s = repeats * _forward_seconds(closed, device) - inner_s
  return [Layer(prefix, max(own_s, 0.0)), *inner_layers]


def _forward_seconds(
  closed: core.jax_core.ClosedJaxpr, device: perfmodel.Device
) -> float:
  """Predicts the seconds of running a program once."""
  run = core.jax_core.jaxpr_as_fun(closed)
  inputs = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in closed.in_avals]
  cost = perfmodel.predict_cost(run, *inputs, while_trips=1)
  return perfmodel.predict_seconds(cost, device)
