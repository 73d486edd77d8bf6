"""Predicts the seconds of encoding and decoding with any codec.

A codec is traced once, on a fixed sample array, because tracing is slow. The
FLOPs and bytes of its kernels are then scaled to the requested size. The cost
of a codec is taken as linear in the size.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from jaxmotion import codecs, core
from jaxmotion.core import PyTree
from jaxmotion.perfmodel import cost, platform
from jaxmotion.perfmodel.predict import _roofline

_SAMPLE = jax.ShapeDtypeStruct((1024, 1024), "float32")


def encode_seconds(
  codec: codecs.Codec, size: int, device: platform.Device
) -> float:
  """Predicts the seconds of encoding one array.

  A curve that was measured on the device ("encode CODEC") takes precedence.
  Otherwise the codec is traced on a matrix of 2^20 elements, and the FLOPs and
  bytes of its kernels are scaled to `size`. A loop whose trip count is unknown
  counts as one iteration: codecs use such loops only to update memory in
  place.

  Args:
    codec: codec of arrays; `identity()` takes no time.
    size: number of elements of the array.
    device: the device that encodes.

  Returns:
    Seconds.

  Example:
    >>> from jaxmotion import codecs
    >>> from jaxmotion.perfmodel import builtin_platform
    >>> host = builtin_platform("ethernet_1gbit").device
    >>> int8 = codecs.uniform(bits=8)
    >>> encode_seconds(int8, 10**7, host) > encode_seconds(int8, 10**6, host)
    True
  """
  if codec == codecs.identity() or not size:
    return 0.0
  curve = device.measured.get(f"encode {codec!r}")
  if curve:
    return curve.seconds_at(size)
  return _scaled_seconds(_trace_encode(codec), size, device)


def decode_seconds(
  codec: codecs.Codec, size: int, payloads: int, device: platform.Device
) -> float:
  """Predicts the seconds of decoding several payloads and summing the results.

  Measured curves ("decode CODEC" and "add CODEC") take precedence, if the
  device has both.

  Args:
    codec: codec of arrays; `identity()` takes no time for one payload.
    size: number of elements of each decoded array.
    payloads: number of payloads; each after the first takes as long as the
      second one.
    device: the device that decodes.

  Returns:
    Seconds.

  Example:
    >>> from jaxmotion import codecs
    >>> from jaxmotion.perfmodel import builtin_platform
    >>> host = builtin_platform("ethernet_1gbit").device
    >>> one, two, three = (
    ...   decode_seconds(codecs.sign(), 10**6, n, host) for n in (1, 2, 3)
    ... )
    >>> one < two and abs((three - two) - (two - one)) < 1e-9
    True
  """
  if not size:
    return 0.0
  curves = [device.measured.get(f"{op} {codec!r}") for op in ("decode", "add")]
  if all(curves):
    first_s, next_s = (curve.seconds_at(size) for curve in curves if curve)
  else:
    first_s = _scaled_seconds(_trace_decode(codec, 1), size, device)
    both_s = _scaled_seconds(_trace_decode(codec, 2), size, device)
    next_s = max(both_s - first_s, 0.0)
  first_s = 0.0 if codec == codecs.identity() else first_s
  return first_s + (payloads - 1) * next_s


def _scaled_seconds(
  sample: cost.Cost, size: int, device: platform.Device
) -> float:
  """Predicts the seconds of a sample's kernels, scaled to `size` elements."""
  share = size / _SAMPLE.size
  return sum(
    _roofline.kernel_seconds(
      k._replace(flops=k.flops * share, bytes=k.bytes * share), device
    )
    for k in sample.kernels
  )


@functools.lru_cache(maxsize=256)
def _trace_encode(codec: codecs.Codec) -> cost.Cost:
  """Counts the kernels of encoding the sample array."""

  def encode(x: jax.Array, state: PyTree) -> PyTree:
    return codec.encode(x, state, core.make_key(0))

  state = jax.eval_shape(codec.init, _SAMPLE)
  return cost.predict_cost(encode, _SAMPLE, state, while_trips=1)


@functools.lru_cache(maxsize=512)
def _trace_decode(codec: codecs.Codec, payloads: int) -> cost.Cost:
  """Counts the kernels of decoding and summing payloads of the sample."""

  def decode(payloads: PyTree) -> jax.Array:
    return jnp.sum(jax.vmap(lambda p: codec.decode(p, _SAMPLE))(payloads), 0)

  stacked = jax.tree.map(
    lambda a: jax.ShapeDtypeStruct((payloads, *a.shape), a.dtype),
    codec.payload_like(_SAMPLE),
  )
  return cost.predict_cost(decode, stacked, while_trips=1)
