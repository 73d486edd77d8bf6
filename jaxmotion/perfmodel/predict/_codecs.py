"""Seconds that a codec takes on a device: traced once, scaled by the values."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from jaxmotion.codecs import Codec, identity
from jaxmotion.core import PyTree, make_key
from jaxmotion.perfmodel.cost import Cost, predict_cost
from jaxmotion.perfmodel.platform import Device
from jaxmotion.perfmodel.predict._roofline import kernel_seconds

_SAMPLE = jax.ShapeDtypeStruct((1024, 1024), "float32")


def encode_seconds(codec: Codec, values: int, device: Device) -> float:
  """Returns the seconds of encoding an array.

  Measured, if the device has a curve for it. Else the codec is traced on a
  matrix of 2^20 values, and FLOPs and bytes of its kernels grow with the number
  of values. Loops of a codec that do not say how often they run, run once:
  they are those that update memory in place.

  Args:
    codec: of arrays; `identity()` takes no time.
    values: of the array.
    device: what it runs on.

  Example:
    >>> from jaxmotion import codecs
    >>> from jaxmotion.perfmodel import builtin_platform
    >>> host = builtin_platform("ethernet_1gbit").device
    >>> int8 = codecs.uniform(bits=8)
    >>> encode_seconds(int8, 10**7, host) > encode_seconds(int8, 10**6, host)
    True
  """
  if codec == identity() or not values:
    return 0.0
  curve = device.measured.get(f"encode {codec!r}")
  return (
    curve.at(values) if curve else _scaled(_encoding(codec), values, device)
  )


def decode_seconds(
  codec: Codec, values: int, payloads: int, device: Device
) -> float:
  """Returns the seconds of decoding payloads of equal arrays and adding them.

  Args:
    codec: of arrays; `identity()` takes no time for one payload.
    values: of each array.
    payloads: how many; each one more takes as long as the second.
    device: what it runs on.

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
  if not values:
    return 0.0
  curves = [device.measured.get(f"{do} {codec!r}") for do in ("decode", "add")]
  if all(curves):
    first, more = (curve.at(values) for curve in curves if curve)
  else:
    first = _scaled(_decoding(codec, 1), values, device)
    two = _scaled(_decoding(codec, 2), values, device)
    more = max(two - first, 0.0)
  first = 0.0 if codec == identity() else first
  return first + (payloads - 1) * more


def _scaled(sample: Cost, values: int, device: Device) -> float:
  share = values / _SAMPLE.size
  return sum(
    kernel_seconds(
      k._replace(flops=k.flops * share, bytes=k.bytes * share), device
    )
    for k in sample.kernels
  )


@functools.lru_cache(maxsize=256)
def _encoding(codec: Codec) -> Cost:
  def encode(x: jax.Array, state: PyTree) -> PyTree:
    return codec.encode(x, state, make_key(0))

  state = jax.eval_shape(codec.init, _SAMPLE)
  return predict_cost(encode, _SAMPLE, state, while_trips=1)


@functools.lru_cache(maxsize=512)
def _decoding(codec: Codec, payloads: int) -> Cost:
  def decode(payloads: PyTree) -> jax.Array:
    return jnp.sum(jax.vmap(lambda p: codec.decode(p, _SAMPLE))(payloads), 0)

  stacked = jax.tree.map(
    lambda a: jax.ShapeDtypeStruct((payloads, *a.shape), a.dtype),
    codec.payload_like(_SAMPLE),
  )
  return predict_cost(decode, stacked, while_trips=1)
