"""Predicted batch time of VGG-A on the paper's machines with any codec.

All rates come from the paper's own profile. A transfer takes the fp32 time
times its share of the fp32 bytes. Computation and update take the fp32 time.
Packing and unpacking take the bytes they touch at the rates of the paper's
Bitpack (host) and Bitunpack (device). Nothing here is measured on those
machines, so every figure is a prediction.
"""

from collections.abc import Sequence
from typing import NamedTuple

from experiments.weights import paper

_FLOAT_BYTES = 4


class PackingRates(NamedTuple):
  """Bytes per millisecond that packing reads and writes.

  Attributes:
    host: rate of Bitpack.
    device: rate of Bitunpack.
  """

  host: float
  device: float


class TouchedBytes(NamedTuple):
  """Bytes per weight that a case moves, and that coding reads and writes.

  Attributes:
    down: payload of the weight, host to device.
    up: payload of the gradient, device to host.
    pack: packing of the weight, on the host.
    unpack: unpacking of the weight, on the device.
    grad_pack: packing of the gradient, on the device.
    grad_unpack: unpacking of the payloads of all GPUs, on the host.
    norm: input of the controller, on the host.
  """

  down: float = _FLOAT_BYTES
  up: float = _FLOAT_BYTES
  pack: float = 0.0
  unpack: float = 0.0
  grad_pack: float = 0.0
  grad_unpack: float = 0.0
  norm: float = 0.0


class BatchTimes(NamedTuple):
  """Predicted milliseconds of one batch, by parts in sequence.

  Attributes:
    pack: packing of the weights, on the host.
    host_to_device: transfer of the weights.
    unpack: unpacking of the weights, on the device.
    forward: forward pass, a third of the computation.
    backward: backward pass, the rest of the computation.
    grad_pack: packing of the gradients, on the device.
    device_to_host: transfer of the gradients.
    grad_unpack: unpacking of the gradients, on the host.
    update: update of the weights, on the host.
    norm: input of the controller, on the host.
  """

  pack: float
  host_to_device: float
  unpack: float
  forward: float
  backward: float
  grad_pack: float
  device_to_host: float
  grad_unpack: float
  update: float
  norm: float = 0.0


class StageShare(NamedTuple):
  """Share of one stage in a network.

  Attributes:
    weights: share of all weights.
    work: share of all floating-point operations.
  """

  weights: float
  work: float


def packing_rates(system: str, weights: int) -> PackingRates:
  """Returns the rates of the paper's packing, from its times and bytes."""
  # Bitpack reads the 4 bytes of a weight and writes those that are sent;
  # Bitunpack reads these and writes 4. The ratio of the two transfer times
  # gives the number of bytes that are sent.
  plain = paper.PROFILES[system, "fp32"]
  packed = paper.PROFILES[system, "a2dtwp"]
  sent = _FLOAT_BYTES * packed.host_to_device / plain.host_to_device
  touched = weights * (_FLOAT_BYTES + sent)
  return PackingRates(touched / packed.pack, touched / packed.unpack)


def predict_batch(
  system: str, weights: int, touched: TouchedBytes
) -> BatchTimes:
  """Returns the times of one batch of VGG-A at batch 64."""
  plain = paper.PROFILES[system, "fp32"]
  rate = packing_rates(system, weights)
  return BatchTimes(
    pack=weights * touched.pack / rate.host,
    host_to_device=plain.host_to_device * touched.down / _FLOAT_BYTES,
    unpack=weights * touched.unpack / rate.device,
    forward=plain.compute / 3,
    backward=2 * plain.compute / 3,
    grad_pack=weights * touched.grad_pack / rate.device,
    device_to_host=plain.device_to_host * touched.up / _FLOAT_BYTES,
    grad_unpack=weights * touched.grad_unpack / rate.host,
    update=plain.update,
    norm=weights * touched.norm / rate.host,
  )


def overlapped_ms(batch: BatchTimes, shares: Sequence[StageShare]) -> float:
  """Returns the time of a batch whose stages overlap."""
  # Stages go to the device in order: while the host packs a stage, the link
  # carries the stage before and the device computes an earlier one. Gradients
  # come back in reverse order. The host, each direction of the link and the
  # device do one thing at a time. Batches do not overlap.
  host = link = device = 0.0
  for share in shares:
    host += share.weights * batch.pack
    link = max(link, host) + share.weights * batch.host_to_device
    device = max(device, link) + share.weights * batch.unpack
    device += share.work * batch.forward
  link = 0.0
  for share in reversed(shares):
    device += share.work * batch.backward + share.weights * batch.grad_pack
    link = max(link, device) + share.weights * batch.device_to_host
    host = max(host, link)
    host += share.weights * (batch.grad_unpack + batch.update)
  return host + batch.norm


def stage_shares(
  weights: Sequence[float], flops: Sequence[float]
) -> list[StageShare]:
  """Returns the share of each stage in weights and work.

  Args:
    weights: number of weights of each stage.
    flops: floating-point operations of each stage.

  >>> stage_shares([1, 3], [4, 1])[0]
  StageShare(weights=0.25, work=0.8)
  """
  return [
    StageShare(w / sum(weights), f / sum(flops))
    for w, f in zip(weights, flops, strict=True)
  ]
