"""The batch time of VGG-A on the paper's machines if other bytes moved.

Everything comes from the paper's own profile: a transfer takes the fp32 time
times the share of its bytes, computation and update take the fp32 time, and
packing and unpacking take the bytes they touch at the rate that the paper's
Bitpack (host) and Bitunpack (device) touch theirs. Nothing here is measured on
those machines, so every figure is a prediction.
"""

from collections.abc import Sequence
from typing import NamedTuple

from experiments.weights import paper

_FLOAT_BYTES = 4


class Rates(NamedTuple):
  """Bytes a millisecond that packing reads and writes.

  Attributes:
    host: of Bitpack.
    device: of Bitunpack.
  """

  host: float
  device: float


class Touched(NamedTuple):
  """Bytes a weight that a case moves, and that coding reads and writes.

  Attributes:
    down: of the payload, host to device.
    up: of the gradient's payload, device to host.
    pack: on the host.
    unpack: on the device.
    grad_pack: on the device.
    grad_unpack: on the host, for the payloads of all GPUs.
    norm: on the host, for what a controller is told.
  """

  down: float = _FLOAT_BYTES
  up: float = _FLOAT_BYTES
  pack: float = 0.0
  unpack: float = 0.0
  grad_pack: float = 0.0
  grad_unpack: float = 0.0
  norm: float = 0.0


class Batch(NamedTuple):
  """Predicted milliseconds of one batch, one after the other.

  Attributes:
    pack: weights, on the host.
    host_to_device: transfer of weights.
    unpack: weights, on the device.
    forward: a third of the computation.
    backward: the rest of it.
    grad_pack: gradients, on the device.
    device_to_host: transfer of gradients.
    grad_unpack: gradients, on the host.
    update: on the host.
    norm: what a controller is told, on the host.
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


class Share(NamedTuple):
  """A stage's share of a network.

  Attributes:
    weights: of all weights.
    work: of all floating-point operations.
  """

  weights: float
  work: float


def rates(system: str, weights: int) -> Rates:
  """What the paper's packing reaches, by its own times and bytes.

  Bitpack reads 4 bytes of a weight and writes those that are sent; Bitunpack
  reads these and writes 4. How many are sent follows from the two transfers.

  Args:
    system: `x86` or `power`.
    weights: of VGG-A.
  """
  plain = paper.PROFILES[system, "fp32"]
  packed = paper.PROFILES[system, "a2dtwp"]
  sent = _FLOAT_BYTES * packed.host_to_device / plain.host_to_device
  touched = weights * (_FLOAT_BYTES + sent)
  return Rates(touched / packed.pack, touched / packed.unpack)


def predict(system: str, weights: int, touched: Touched) -> Batch:
  """The times of one batch of VGG-A at batch 64.

  Args:
    system: `x86` or `power`.
    weights: of VGG-A.
    touched: bytes a weight of the case; the default is fp32.
  """
  plain = paper.PROFILES[system, "fp32"]
  rate = rates(system, weights)
  return Batch(
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


def overlapped_ms(batch: Batch, shares: Sequence[Share]) -> float:
  """The time of a batch whose stages overlap.

  Stages go down in order: the host packs one while the link carries the one
  before and the device unpacks and computes the one before that. They come
  back in reverse. The host, each direction of the link and the device do one
  thing at a time; batches do not overlap.

  Args:
    batch: times of the whole batch.
    shares: of the stages, in the order they compute in.

  Returns:
    Milliseconds until the last update and, after it, `norm`.
  """
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


def shares(weights: Sequence[float], flops: Sequence[float]) -> list[Share]:
  """The share that each stage has.

  Args:
    weights: of each stage.
    flops: of each stage.

  >>> shares([1, 3], [4, 1])
  [Share(weights=0.25, work=0.8), Share(weights=0.75, work=0.2)]
  """
  return [
    Share(w / sum(weights), f / sum(flops))
    for w, f in zip(weights, flops, strict=True)
  ]
