"""Collectives of float32 weights at a precision that changes at run time.

A float32 element is four bytes, from the sign and exponent down to the last
bits of the mantissa. Byte plane i holds byte i of every element. At level l
the first l + 1 planes travel and the others are zero (`codecs.truncate`). One
program serves all levels, by one branch with a copy of the exchange for each.

Weights need no error memory: the next step sends the current ones again. A lost
part of a gradient would stay lost.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.flatten_util import ravel_pytree

from jaxmotion import codecs, core
from jaxmotion.collectives import _arguments, _rounds
from jaxmotion.core import Array, AxisName, PyTree

_ELEMENT_BYTES = 4


@core.declare(x=core.typed_arrays, axis_name=core.mesh_axes, tiled=core.boolean)
def all_gather_planes(
  x: PyTree,
  axis_name: AxisName,
  level: Any,
  *,
  axis: int = 0,
  tiled: bool = False,
  rounding: str = "zero",
) -> PyTree:
  """Gathers every worker's float32 elements, `level` + 1 bytes of each.

  The result is `truncate(bytes=level + 1)` of every worker's elements bit for
  bit, the sender's own included, so it is the same on all workers. One program
  serves all levels and sends only the bytes of the chosen one. The uint8 words
  of the whole tree travel in one collective (two if they are large). The
  gradient is that of `lax.all_gather`.

  Gather parameters of different levels in one call for each level group.

  Args:
    x: pytree of float32 arrays, this worker's own.
    axis_name: the workers' axis.
    level: int32[], 0 to 3, equal on all workers. A traced level out of range
      is clamped to the nearest one.
    axis: position of the workers' axis in the result, or (tiled) the axis to
      concatenate along.
    tiled: whether to concatenate along `axis` instead of stacking.
    rounding: "zero" or "nearest", as for `truncate`.

  Returns:
    The gathered tree.

  Raises:
    TypeError: a leaf that is not float32, a level that is no integer scalar.
    ValueError: an unbound axis, a level that may differ between workers.

  Example:
    >>> mesh = jax.sharding.Mesh(jax.devices()[:1], ("data",))
    >>> f = jax.jit(jax.shard_map(
    ...   lambda x, level: all_gather_planes(x, "data", level, tiled=True),
    ...   mesh=mesh, in_specs=(jax.P("data"), jax.P()), out_specs=jax.P(),
    ... ))
    >>> x = {"w": jnp.array([1.0, 3.14159274])}
    >>> [f(x, level)["w"].tolist() for level in (0, 1, 3)]
    [[0.5, 2.0], [1.0, 3.140625], [1.0, 3.1415927410125732]]

  References:
    Zhuang, Malossi and Casas, *Reducing Data Motion to Accelerate the Training
    of Deep Neural Networks*, 2020 (A2DTWP: the same bytes, from host to
    device).
  """
  core.axis_size(axis_name)  # Raises unless it is bound.
  axes = [
    _arguments.check_position("axis", axis, leaf.ndim + (not tiled))
    for leaf in jax.tree.leaves(x)
  ]
  join = jnp.concatenate if tiled else jnp.stack

  def gather(codec: codecs.Codec, leaves: list[Array]) -> list[Array]:
    each = [_rounds.LeafCodec(codec, None)] * len(leaves)
    decoded = _rounds.gather_shards(leaves, each, axis_name)
    return [
      join(list(rows), axis=position)
      for rows, position in zip(decoded, axes, strict=True)
    ]

  def reference_op(leaves: list[Array]) -> list[Array]:
    return [
      core.gather_replicated(a, axis_name, position, tiled=tiled)
      for a, position in zip(leaves, axes, strict=True)
    ]

  return _send_planes(x, axis_name, level, rounding, gather, reference_op)


@core.declare(x=core.typed_arrays, axis_name=core.mesh_axes)
def broadcast_planes(
  x: PyTree,
  axis_name: AxisName,
  level: Any,
  *,
  source: int = 0,
  rounding: str = "zero",
) -> PyTree:
  """Broadcasts one worker's float32 elements, `level` + 1 bytes of each.

  It is `all_gather_planes` of the source's elements alone. The words travel as
  a sum to which the other workers add zeros. This costs each of N workers
  2 (N - 1) / N of the bytes. The gradient goes to the source.

  Args:
    x: pytree of float32 arrays; only the source's are read.
    axis_name: the workers' axis.
    level: int32[], 0 to 3, equal on all workers. A traced level out of range
      is clamped to the nearest one.
    source: index of the worker that broadcasts.
    rounding: "zero" or "nearest", as for `truncate`.

  Returns:
    A tree like `x`: `truncate(bytes=level + 1)` of the source's elements, on
    the source too.

  Raises:
    TypeError: a leaf that is not float32, a level that is no integer scalar.
    ValueError: an unbound axis, a level that may differ between workers, a
      source that is no worker.

  Example:
    >>> mesh = jax.sharding.Mesh(jax.devices()[:1], ("data",))
    >>> f = jax.jit(jax.shard_map(
    ...   lambda x, level: broadcast_planes(x, "data", level),
    ...   mesh=mesh, in_specs=(jax.P("data"), jax.P()), out_specs=jax.P(),
    ... ))
    >>> f(jnp.array([1.0, 3.14159274]), 1).tolist()
    [1.0, 3.140625]
  """
  core.integer(0, core.axis_size(axis_name) - 1)("source", source)
  is_source = core.worker_index(axis_name) == source

  def sum_from_source(x: PyTree) -> PyTree:
    own = jax.tree.map(lambda a: jnp.where(is_source, a, jnp.zeros_like(a)), x)
    return lax.psum(own, axis_name)

  def broadcast(codec: codecs.Codec, leaves: list[Array]) -> list[Array]:
    words, restore = ravel_pytree([codec.encode(a)[0] for a in leaves])
    payloads = restore(sum_from_source(words))
    return [
      codec.decode(payload, a)
      for payload, a in zip(payloads, leaves, strict=True)
    ]

  return _send_planes(x, axis_name, level, rounding, broadcast, sum_from_source)


def _send_planes(
  x: PyTree,
  axis_name: AxisName,
  level: Any,
  rounding: str,
  send: Callable[[codecs.Codec, list[Array]], list[Array]],
  reference_op: Callable[[list[Array]], list[Array]],
) -> PyTree:
  """Sends the leaves of `x` by `send`, with the gradient of `reference_op`."""
  for path, a in core.named_leaves(x):
    if a.dtype != jnp.float32:
      name = f"x/{path}" if path else "x"
      raise TypeError(
        f"`{name}` must be a float32 array, got {core.shape_string(a)}."
      )
  level = _arguments.check_level(level, _ELEMENT_BYTES, axis_name)
  leaves, treedef = jax.tree.flatten(x)
  leaves = core.to_varying(leaves, axis_name)

  branches = [
    functools.partial(send, codecs.truncate(bytes=count, rounding=rounding))
    for count in range(1, _ELEMENT_BYTES + 1)
  ]
  y = lax.switch(level, branches, lax.stop_gradient(leaves))
  return jax.tree.unflatten(
    treedef, _arguments.straight_through(reference_op, leaves, y)
  )
