"""Layout of sharded parameters: which dimension of a leaf workers cut."""

import math
from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from jaxmotion import core
from jaxmotion.collectives.extend import is_sharded
from jaxmotion.core import Array, AxisName, PyTree, ShapedLike


class LeafCut(NamedTuple):
  """Division of one leaf between workers.

  Attributes:
    shape: shape of the leaf.
    dimension: dimension that is cut, or None if all workers hold it whole.
    length: length of that dimension on one worker.
  """

  shape: tuple[int, ...]
  dimension: int | None
  length: int
  workers: int

  @property
  def is_cut(self) -> bool:
    """Whether each worker has a part of the leaf."""
    return self.dimension is not None

  @property
  def is_padded(self) -> bool:
    """Whether the parts of all workers are longer than the leaf."""
    return self.shard_shape(self.workers) != self.shape

  def shard_shape(self, scale: int = 1) -> tuple[int, ...]:
    """Returns the shape of one worker's part, or of `scale` parts."""
    if self.dimension is None:
      return self.shape
    shape = list(self.shape)
    shape[self.dimension] = scale * self.length
    return tuple(shape)

  def cut_rows(self, x: Array) -> Array:
    """Returns the parts of all workers: (workers, *shard_shape)."""
    dimension = self._cut_dimension()
    before, after = self.shape[:dimension], self.shape[dimension + 1 :]
    x = self.pad_leaf(x).reshape(*before, self.workers, self.length, *after)
    return jnp.moveaxis(x, dimension, 0)

  def join_rows(self, rows: Array) -> Array:
    """Returns the leaf of all workers' parts: inverts `cut_rows`."""
    dimension = self._cut_dimension()
    x = jnp.moveaxis(rows, 0, dimension)
    return self.trim_leaf(x.reshape(self.shard_shape(self.workers)))

  def own_part(self, x: Array, axis_name: AxisName) -> Array:
    """Returns this worker's part of a leaf, typed as varying if it is cut."""
    if self.dimension is None:
      return x
    start = core.worker_index(axis_name) * self.length
    return lax.dynamic_slice_in_dim(
      core.to_varying(self.pad_leaf(x), axis_name),
      start,
      self.length,
      self.dimension,
    )

  def clear_padding(self, part: Array, axis_name: AxisName) -> Array:
    """Returns this worker's part of a leaf with zeros in place of padding."""
    if not self.is_padded:
      return part
    dimension = self._cut_dimension()
    index = lax.broadcasted_iota(jnp.int32, part.shape, dimension)
    index += core.worker_index(axis_name) * self.length
    return jnp.where(index < self.shape[dimension], part, 0)

  def pad_leaf(self, x: Array) -> Array:
    """Returns a leaf with zeros behind it, as long as all workers' parts."""
    if not self.is_padded:
      return x
    dimension = self._cut_dimension()
    padding = [(0, 0)] * x.ndim
    padding[dimension] = (0, self.workers * self.length - x.shape[dimension])
    return jnp.pad(x, padding)

  def trim_leaf(self, x: Array) -> Array:
    """Returns a leaf without its padding: inverts `pad_leaf`."""
    if not self.is_padded:
      return x
    dimension = self._cut_dimension()
    return lax.slice_in_dim(x, 0, self.shape[dimension], axis=dimension)

  def _cut_dimension(self) -> int:
    assert self.dimension is not None, "the leaf is whole"
    return self.dimension


def cut_leaf(
  like: ShapedLike, workers: int, sharded: Collection[int] = ()
) -> LeafCut:
  """Returns how workers divide a leaf between them, with the least padding.

  >>> cut_leaf(jnp.zeros((3, 3, 32, 64)), 4)[1:3]
  (2, 8)
  >>> cut_leaf(jnp.zeros((32, 65)), 3).shard_shape()
  (32, 22)
  >>> cut_leaf(jnp.zeros((32, 65)), 4, sharded=[0])[1:3]
  (1, 17)
  >>> cut_leaf(jnp.zeros(32), 4).dimension is None
  True
  """
  # The dimension is the one that needs the least padding, the first of several.
  # sharded: dimensions that an axis of the model shards, and workers do not.
  free = [i for i in range(len(like.shape)) if i not in sharded]
  return _cut_first(
    like, workers, free, lambda n: math.ceil(n / workers) * workers / n
  )


def cut_longest(
  like: ShapedLike,
  workers: int,
  *,
  first: int = 0,
  sharded: Collection[int] = (),
) -> LeafCut:
  """Returns how workers divide a leaf along its longest dimension.

  >>> cut_longest(jnp.zeros((8, 32, 64)), 4)[1:3]
  (2, 16)
  >>> cut_longest(jnp.zeros((8, 32, 64)), 4, sharded=[2])[1:3]
  (1, 8)
  >>> cut_longest(jnp.zeros((99, 30)), 4).shard_shape()
  (25, 30)
  """
  # The dimension is the longest one that the workers divide, the first of
  # several. If they divide none, it is the longest one, which is padded.
  # first: first dimension that may be cut. sharded: as in `cut_leaf`.
  free = [i for i in range(first, len(like.shape)) if i not in sharded]
  return _cut_first(like, workers, free, lambda n: (n % workers > 0, -n))


def _cut_first(
  like: ShapedLike, workers: int, free: list[int], rank: Callable[[int], Any]
) -> LeafCut:
  """Returns the division along the free dimension whose length ranks first."""
  # A leaf of fewer than 64 elements per worker stays whole, and so does one
  # whose padding would double it.
  shape = tuple(like.shape)
  whole = LeafCut(shape, None, 0, workers)
  if not free or not is_sharded(like, workers):
    return whole
  dimension = min(free, key=lambda i: rank(shape[i]))
  length = math.ceil(shape[dimension] / workers)
  if workers * length >= 2 * shape[dimension]:
    return whole
  return LeafCut(shape, dimension, length, workers)


def find_dimensions(
  init: Any, params: PyTree, cuts: Sequence[LeafCut]
) -> tuple[int | None, ...]:
  """Returns which dimension of every leaf of an optimizer's state is cut."""
  # Where shards of the parameters are longer, so are the leaves of the state
  # that are cut; all others keep their shape.
  cut = [() if c.dimension is None else (c.dimension,) for c in cuts]
  return tuple(
    next(iter(found), None) for found in _find_longer(init, params, cut)
  )


def find_shards(
  init: Any, params: PyTree, specs: Sequence[PartitionSpec]
) -> list[dict[int, Any]]:
  """Returns which axes of a model shard every leaf of an optimizer's state."""
  entries = dict.fromkeys(e for spec in specs for e in spec if e is not None)
  found: list[dict[int, Any]] = [
    {} for _ in jax.tree.leaves(jax.eval_shape(init, params))
  ]
  for entry in entries:
    along = [tuple(i for i, e in enumerate(s) if e == entry) for s in specs]
    for known, more in zip(
      found, _find_longer(init, params, along), strict=True
    ):
      known |= dict.fromkeys(more, entry)
  return found


def _find_longer(
  init: Any, params: PyTree, dimensions: Sequence[tuple[int, ...]]
) -> list[list[int]]:
  """Returns which dimensions of a state are longer if some of parameters
  are."""
  leaves: Any = jax.tree.leaves(params)
  treedef: Any = jax.tree.structure(params)

  def state_like(scale: int) -> list[Any]:
    likes = [
      jax.ShapeDtypeStruct(
        [n * scale if i in longer else n for i, n in enumerate(x.shape)],
        x.dtype,
      )
      for x, longer in zip(leaves, dimensions, strict=True)
    ]
    state = jax.eval_shape(init, treedef.unflatten(likes))
    return jax.tree.leaves(state)

  one, two = state_like(1), state_like(2)
  if len(one) != len(two):
    raise ValueError(
      "`tx` must have a state with as many arrays whatever the shapes of the "
      f"parameters are, got {len(one)}, and {len(two)} for parts of twice the "
      "size."
    )
  return [
    [i for i, n in enumerate(a.shape) if n != b.shape[i]]
    for a, b in zip(one, two, strict=True)
  ]


def map_cuts(
  fun: Callable[[LeafCut, Any], Any], tree: PyTree, cuts: Sequence[LeafCut]
) -> PyTree:
  """Applies a function to the division and the array of every leaf."""
  treedef: Any = jax.tree.structure(tree)
  pairs = zip(cuts, jax.tree.leaves(tree), strict=True)
  return treedef.unflatten([fun(cut, x) for cut, x in pairs])


def select_whole(tree: PyTree, cuts: Sequence[LeafCut]) -> PyTree:
  """Returns a tree without the leaves that workers cut."""
  return map_cuts(lambda cut, x: None if cut.is_cut else x, tree, cuts)
