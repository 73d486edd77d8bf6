"""Weights between workers, at a precision that adapts while training runs."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.flatten_util import ravel_pytree

from jaxmotion.codecs import Codec, truncate
from jaxmotion.collectives._adaptive import check_level
from jaxmotion.collectives._shared import straight_through
from jaxmotion.collectives._transport import gather
from jaxmotion.core import (
  Array,
  AxisName,
  PyTree,
  axis_size,
  check_int,
  named_leaves,
  shape_string,
  to_varying,
  worker_index,
)

_WORD_BYTES = 4


def all_gather_planes(
  x: PyTree,
  axis_name: AxisName,
  level: Any,
  *,
  axis: int = 0,
  tiled: bool = False,
  rounding: str = "zero",
) -> PyTree:
  """Gathers every worker's float32 values, of which `level` + 1 bytes travel.

  The result is `truncate(bytes=level + 1)` of every worker's values bit for
  bit, the sender's own included, so it is the same on all workers. One program
  serves all levels and sends only the bytes of the one that is chosen, as
  uint8 words of the whole tree in one collective (two where they are large).
  The gradient is that of `lax.all_gather`.

  Parameters whose levels differ are gathered in one call for each group.

  Args:
    x: pytree of float32 arrays, this worker's own.
    axis_name: the workers' axis.
    level: int32[], 0 to 3, equal on all workers. A traced level out of range
      is clamped to the nearest one.
    axis: where the workers' axis goes, or (tiled) the axis to join along.
    tiled: join along `axis` instead of stacking.
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
    of Deep Neural Networks*, 2020 (the same bytes, from host to device).
  """
  join = jnp.concatenate if tiled else jnp.stack

  def carry(codec: Codec, leaves: list[Array]) -> list[Array]:
    payloads = gather([codec.encode(a)[0] for a in leaves], axis_name)
    decoded = [
      jax.vmap(lambda p, a=a: codec.decode(p, a))(payload)
      for payload, a in zip(payloads, leaves, strict=True)
    ]
    return [join(list(rows), axis=axis) for rows in decoded]

  def stock(leaves: list[Array]) -> list[Array]:
    return [
      lax.all_gather(a, axis_name, axis=axis, tiled=tiled, to="invarying")
      for a in leaves
    ]

  return _move(x, axis_name, level, rounding, carry, stock)


def broadcast_planes(
  x: PyTree,
  axis_name: AxisName,
  level: Any,
  *,
  source: int = 0,
  rounding: str = "zero",
) -> PyTree:
  """Gives all workers one worker's float32 values, in `level` + 1 bytes each.

  As `all_gather_planes`, but of the source's values alone. The words travel as
  a sum to which the others add zeros, which costs each of N workers
  2 (N - 1) / N of the bytes. The gradient goes to the source.

  Args:
    x: pytree of float32 arrays; the source's count.
    axis_name: the workers' axis.
    level: int32[], 0 to 3, equal on all workers. A traced level out of range
      is clamped to the nearest one.
    source: index of the worker whose values all get.
    rounding: "zero" or "nearest", as for `truncate`.

  Returns:
    A tree like `x`: `truncate(bytes=level + 1)` of the source's values, on
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
  check_int("source", source, 0, axis_size(axis_name) - 1)
  mine = worker_index(axis_name) == source

  def from_source(x: PyTree) -> PyTree:
    words = jax.tree.map(lambda a: jnp.where(mine, a, jnp.zeros_like(a)), x)
    return lax.psum(words, axis_name)

  def carry(codec: Codec, leaves: list[Array]) -> list[Array]:
    words, restore = ravel_pytree([codec.encode(a)[0] for a in leaves])
    payloads = restore(from_source(words))
    return [
      codec.decode(payload, a)
      for payload, a in zip(payloads, leaves, strict=True)
    ]

  return _move(x, axis_name, level, rounding, carry, from_source)


def _move(
  x: PyTree,
  axis_name: AxisName,
  level: Any,
  rounding: str,
  carry: Callable[[Codec, list[Array]], list[Array]],
  stock: Callable[[list[Array]], list[Array]],
) -> PyTree:
  """Moves the leaves of `x` by `carry`, with the gradient of `stock`."""
  for path, a in named_leaves(x):
    if a.dtype != jnp.float32:
      name = f"x/{path}" if path else "x"
      raise TypeError(
        f"`{name}` must be a float32 array, got {shape_string(a)}."
      )
  level = check_level(level, _WORD_BYTES, axis_name)
  leaves, treedef = jax.tree.flatten(x)
  leaves = to_varying(leaves, axis_name)

  def branch(count: int) -> Callable[[list[Array]], list[Array]]:
    codec = truncate(bytes=count, rounding=rounding)
    return lambda leaves: carry(codec, leaves)

  branches = [branch(count) for count in range(1, _WORD_BYTES + 1)]
  y = lax.switch(level, branches, lax.stop_gradient(leaves))
  return jax.tree.unflatten(treedef, straight_through(stock, leaves, y))
