"""Transfers of arrays between pairs of workers through a codec."""

from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxmotion import codecs, core
from jaxmotion.codecs.extend import check_codec
from jaxmotion.collectives import (
  _arguments,
  _rows,
  _straight_through,
  _transport,
)
from jaxmotion.core import Array, AxisName

Pairs = tuple[tuple[int, int], ...]


def permute(
  x: Array,
  axis_name: AxisName,
  pairs: Sequence[tuple[int, int]],
  codec: codecs.Codec | None = None,
  *,
  backward: codecs.Codec | None = None,
  key: core.Key | None = None,
) -> Array:
  """Sends an array from one worker of each pair to the other, through a codec.

  It computes `lax.ppermute`: activations go to the next stage of a pipeline,
  and their gradients come back. Each direction has its own codec. A worker that
  is no destination gets zeros. All fields of a payload travel in one buffer.

  Args:
    x: floating-point array, this worker's own.
    axis_name: the workers' axis.
    pairs: (source, destination) of each transfer; no worker is twice a source
      or twice a destination.
    codec: codec of the array, without state; None is full precision.
    backward: codec of the gradient, which travels back, without state; None is
      full precision.
    key: randomness for codecs that need it; the same in both passes.

  Returns:
    The received array, of the dtype of `x`, typed as varying.

  Raises:
    TypeError: `x` is not floating-point.
    ValueError: an unbound axis, a codec with state, pairs that are none, that
      repeat a worker, or that name one which does not exist.

  Example:
    >>> import jax
    >>> from jaxmotion import codecs
    >>> mesh = jax.sharding.Mesh(jax.devices()[:1], ("stage",))
    >>> def send(x):
    ...   return permute(x, "stage", [(0, 0)], codecs.cast("bfloat16"))
    >>> f = jax.shard_map(
    ...   send, mesh=mesh, in_specs=jax.P("stage"), out_specs=jax.P("stage")
    ... )
    >>> jax.jit(f)(jnp.array([1.0, 2.0])).tolist()
    [1.0, 2.0]

  References:
    Wang et al., *Fine-tuning Language Models over Slow Networks using
    Activation Quantization with Guarantees*, 2022 (links between stages).
  """
  _arguments.check_shaped("x", x)
  core.check_float("x", x)
  chosen = []
  for name, one in (("codec", codec), ("backward", backward)):
    one = codecs.identity() if one is None else one
    check_codec(name, one, stateless=True, one_round=True)
    chosen.append(one)
  _arguments.check_key(key)
  workers = _arguments.count_workers(axis_name)
  forth = _check_pairs(pairs, workers)
  back = tuple((target, source) for source, target in forth)

  def send_back(ct: Array, key: core.Key | None) -> Array:
    # Another key than that of the forward pass.
    own = None if key is None else key.fold(workers)
    return _send(ct, axis_name, back, chosen[1], own)

  x, key = core.to_varying((x, key), axis_name)
  y = _send(lax.stop_gradient(x), axis_name, forth, chosen[0], key)
  return _straight_through.with_gradient(send_back, x, y, key)


def _send(
  x: Array,
  axis_name: AxisName,
  pairs: Pairs,
  codec: codecs.Codec,
  key: core.Key | None,
) -> Array:
  """Returns the decoded array of this worker's source, zeros without one."""
  own = _rows.to_encode_dtype(codec, x)
  payload, _ = codec.encode(own, (), key)
  received = _transport.permute_payload(payload, axis_name, pairs)
  y = core.saturate_cast(codec.decode(received, own), x.dtype)
  # A payload of zeros may decode to anything.
  targets = np.array([target for _, target in pairs])
  is_target = jnp.any(core.worker_index(axis_name) == targets)
  return jnp.where(is_target, y, jnp.zeros_like(y))


def _check_pairs(pairs: Sequence[tuple[int, int]], workers: int) -> Pairs:
  """Returns pairs of workers as tuples; raises unless each is one transfer."""
  problem = (
    f"`pairs` must be (source, destination) pairs of workers in [0, "
    f"{workers - 1}], each at most once a source and once a destination, got "
    f"{pairs!r}."
  )
  if not isinstance(pairs, list | tuple) or not pairs:
    raise ValueError(problem)
  for pair in pairs:
    if not isinstance(pair, list | tuple) or len(pair) != 2:
      raise ValueError(problem)
    for worker in pair:
      if not isinstance(worker, int) or isinstance(worker, bool):
        raise ValueError(problem)
      if not 0 <= worker < workers:
        raise ValueError(problem)
  sources, targets = zip(*pairs, strict=True)
  if len(set(sources)) < len(pairs) or len(set(targets)) < len(pairs):
    raise ValueError(problem)
  return tuple((source, target) for source, target in pairs)
