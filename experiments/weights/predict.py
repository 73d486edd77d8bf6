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

# Links are emulated: bandwidths are those of the standard in one direction
# after line coding, before the headers of packets. No real link is faster, so
# the gain of a codec is not overstated. The latency is an assumption, not a
# measurement.
_LATENCY_S = 10e-6


class HostLink(NamedTuple):
  """A link whose two directions do not slow each other down."""

  latency_s: float  # Seconds of every transfer, assumed.
  bandwidth: float  # Bytes per second in each direction.
  source: str  # Document that the bandwidth is from.

  def emulate_ms(self, moved_bytes: float, transfers: float) -> float:
    """Returns emulated milliseconds of transfers in one direction.

    >>> HostLink(1e-3, 1e9, "an example").emulate_ms(5_000_000, 2)
    7.0
    """
    seconds = transfers * self.latency_s + moved_bytes / self.bandwidth
    return 1e3 * seconds


def _pcie_link(gigatransfers: float, lanes: int, generation: str) -> HostLink:
  bandwidth = gigatransfers * 1e9 * lanes * 128 / 130 / 8
  return HostLink(
    _LATENCY_S,
    bandwidth,
    f"PCI Express Base Specification {generation}: {gigatransfers:g} GT/s a"
    f" lane, 128b/130b, {lanes} lanes",
  )


HOST_LINKS = {
  "pcie3_x8": _pcie_link(8.0, 8, "3.0"),
  "pcie5_x16": _pcie_link(32.0, 16, "5.0"),
  "nvlink2_x3": HostLink(
    _LATENCY_S,
    3 * 25e9,
    "IBM Power System AC922, Redpaper REDP-5472: 3 NVLink 2.0 bricks of 25 GB/s"
    " between a POWER9 and each of 4 GPUs",
  ),
}
"""Links by name: 7.88, 63.0 and 75 GB/s each way."""


def emulated_unit(unit: str, link: str) -> str:
  """Returns the unit that rows give to a figure emulated for a link."""
  return f"{unit} (emulated {link})"


_FLOAT_BYTES = 4


class PackingRates(NamedTuple):
  """Bytes per millisecond that packing reads and writes."""

  host: float  # Rate of Bitpack.
  device: float  # Rate of Bitunpack.


class TouchedBytes(NamedTuple):
  """Bytes per weight that a case moves, and that coding reads and writes."""

  down: float = _FLOAT_BYTES  # Payload of the weight, host to device.
  up: float = _FLOAT_BYTES  # Payload of the gradient, device to host.
  pack: float = 0.0  # Packing of the weight, on the host.
  unpack: float = 0.0  # Unpacking of the weight, on the device.
  grad_pack: float = 0.0  # Packing of the gradient, on the device.
  # Unpacking of the payloads of all GPUs, on the host.
  grad_unpack: float = 0.0
  norm: float = 0.0  # Input of the controller, on the host.


class BatchTimes(NamedTuple):
  """Predicted milliseconds of one batch, by parts in sequence."""

  pack: float  # Packing of the weights, on the host.
  host_to_device: float  # Transfer of the weights.
  unpack: float  # Unpacking of the weights, on the device.
  forward: float  # Forward pass, a third of the computation.
  backward: float  # Backward pass, the rest of the computation.
  grad_pack: float  # Packing of the gradients, on the device.
  device_to_host: float  # Transfer of the gradients.
  grad_unpack: float  # Unpacking of the gradients, on the host.
  update: float  # Update of the weights, on the host.
  norm: float = 0.0  # Input of the controller, on the host.


class StageShare(NamedTuple):
  """Share of one stage in a network."""

  weights: float  # Share of all weights.
  work: float  # Share of all floating-point operations.


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

  >>> stage_shares([1, 3], [4, 1])[0]
  StageShare(weights=0.25, work=0.8)
  """
  return [
    StageShare(w / sum(weights), f / sum(flops))
    for w, f in zip(weights, flops, strict=True)
  ]
