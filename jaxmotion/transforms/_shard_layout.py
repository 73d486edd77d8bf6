"""Trees of parameters that workers cut, and optimizers of their parts."""

import dataclasses
import math
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.sharding import PartitionSpec

from jaxmotion import core, program
from jaxmotion.collectives.extend import is_sharded
from jaxmotion.core import Array, AxisName, PyTree, ShapedLike
from jaxmotion.transforms import _model_axes
from jaxmotion.transforms._model_axes import ModelAxes


class LeafCut(NamedTuple):
  """Division of one leaf between workers."""

  shape: tuple[int, ...]
  dimension: int | None  # None: all workers hold the leaf whole.
  length: int  # That of the dimension on one worker.
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
    return tuple(
      scale * self.length if i == self.dimension else n
      for i, n in enumerate(self.shape)
    )

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
    padded = self.shard_shape(self.workers)
    return jnp.pad(
      x, [(0, n - m) for n, m in zip(padded, x.shape, strict=True)]
    )

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
  like: ShapedLike,
  workers: int,
  kept: Collection[int] = (),
  *,
  longest: bool = False,
) -> LeafCut:
  """Returns how workers divide a leaf between them.

  >>> cut_leaf(jnp.zeros((3, 3, 32, 64)), 4)[1:3]
  (2, 8)
  >>> cut_leaf(jnp.zeros((32, 65)), 3).shard_shape()
  (32, 22)
  >>> cut_leaf(jnp.zeros((32, 65)), 4, kept=[0])[1:3]
  (1, 17)
  >>> cut_leaf(jnp.zeros((8, 32, 64)), 4, kept=[2], longest=True)[1:3]
  (1, 8)
  >>> cut_leaf(jnp.zeros((99, 30)), 4, longest=True).shard_shape()
  (25, 30)
  """
  # The dimension is the one that needs the least padding; with `longest`, the
  # longest one that the workers divide, or else the longest one. The first of
  # several is taken.
  # kept: dimensions that are not cut, as those that the model shards.
  shape = tuple(like.shape)
  free = [i for i in range(len(shape)) if i not in kept]
  whole = LeafCut(shape, None, 0, workers)
  if not free or not is_sharded(like, workers):
    return whole

  def rank_dimension(i: int) -> Any:
    n = shape[i]
    if longest:
      return n % workers > 0, -n
    return math.ceil(n / workers) * workers / n

  dimension = min(free, key=rank_dimension)
  length = math.ceil(shape[dimension] / workers)
  # A leaf whose padding would double it stays whole, as a small one does.
  if workers * length >= 2 * shape[dimension]:
    return whole
  return LeafCut(shape, dimension, length, workers)


def map_cuts(
  fun: Callable[[LeafCut, Any], Any], tree: PyTree, cuts: Sequence[LeafCut]
) -> PyTree:
  """Applies a function to the division and the array of every leaf."""
  pairs = zip(cuts, jax.tree.leaves(tree), strict=True)
  leaves = [fun(cut, x) for cut, x in pairs]
  return jax.tree.unflatten(jax.tree.structure(tree), leaves)


def select_whole(tree: PyTree, cuts: Sequence[LeafCut]) -> PyTree:
  """Returns a tree without the leaves that workers cut."""
  return map_cuts(lambda cut, x: None if cut.is_cut else x, tree, cuts)


@dataclasses.dataclass(frozen=True)
class CutTree:
  """Plan of how workers divide a tree of parameters, leaf by leaf."""

  axes: AxisName  # Those of all workers.
  model: ModelAxes
  paths: tuple[str, ...]
  cuts: tuple[LeafCut, ...]

  def select_cut(self, values: Iterable[Any]) -> list[Any]:
    """Selects values of leaves that workers cut, from those of all leaves."""
    return [v for v, cut in zip(values, self.cuts, strict=True) if cut.is_cut]

  def join_leaves(
    self, cut: Iterable[Any], whole: PyTree, like: PyTree
  ) -> PyTree:
    """Puts cut leaves and whole leaves back in the order of a tree, `like`."""
    cut_leaves, whole_leaves = iter(cut), iter(jax.tree.leaves(whole))
    leaves = []
    for cut, spec in zip(self.cuts, self.model.leaf_specs, strict=True):
      x = next(cut_leaves if cut.is_cut else whole_leaves)
      # JAX types it as the buffer of all leaves, which differs over every axis
      # that shards one of them. Only the axes of its own spec are true of it.
      leaves.append(self.model.assert_shared(x, spec))
    return jax.tree.unflatten(jax.tree.structure(like), leaves)

  def split(self, tree: PyTree) -> core.Split:
    """Returns a tree like the parameters, marked with how workers cut it."""
    return core.Split(
      tree,
      tuple(cut.dimension for cut in self.cuts),
      core.axis_names(self.axes),
      tuple(self.model.leaf_specs) if self.model.names else (),
    )

  def mark(self, split: core.Split, source: str = "") -> core.Split:
    """Types arrays as cut; raises if one that is whole differs by worker."""
    # source: what returned the arrays, for the message.
    values = []
    for (path, x), dimension in zip(
      core.named_leaves(split.value), split.dimensions, strict=True
    ):
      if dimension is not None:
        x = core.to_varying(x, self.axes)
      elif core.is_varying(x, self.axes):
        raise _across_error(f"`{source}` returned `{path}`")
      values.append(x)
    treedef = jax.tree.structure(split.value)
    return dataclasses.replace(split, value=jax.tree.unflatten(treedef, values))

  def init(self, tx: optax.GradientTransformation, parts: PyTree) -> core.Split:
    """Makes the state of an optimizer that updates this worker's parts."""
    state, names = tx.init(parts), core.axis_names(self.axes)
    leaves = jax.tree.leaves(state)
    dimensions, shards = [], []
    for x, divided in zip(
      leaves, self._find_divided(tx, parts, leaves), strict=True
    ):
      dimension = next((i for axes, i in divided if axes == names), None)
      # A scale of a short leaf has the same shape, and yet differs by worker.
      if dimension is None and x.ndim and core.is_varying(x, names):
        dimension = 0
      dimensions.append(dimension)
      # The entries of the array's partition spec over axes of the model.
      entries = {i: axes for axes, i in divided if axes != names}
      named = {name for axes in entries.values() for name in axes}
      others = core.varying_axes(x) - named
      if x.ndim and (left := [n for n in self.model.names if n in others]):
        entries.setdefault(0, tuple(left))
      length = max(entries, default=-1) + 1
      shards.append(PartitionSpec(*map(entries.get, range(length))))
    specs = tuple(shards) if self.model.names else ()
    split = core.Split(state, tuple(dimensions), names, specs)
    return self.mark(split, "tx.init")

  def _find_divided(
    self, tx: optax.GradientTransformation, parts: PyTree, state: list[Any]
  ) -> list[list[tuple[tuple[Any, ...], int]]]:
    """Lists the (mesh axes, dimension) that divide each array of a state."""
    # Traces `tx.init` for parameters of twice the length: where parts of the
    # parameters are longer, so are the arrays of the state that are divided.
    # All others keep their shape.
    specs: list[PartitionSpec] = jax.tree.leaves(self.split(parts).specs())
    divided: list[list[tuple[tuple[Any, ...], int]]] = [[] for _ in state]
    entries = [core.spec_axes(entry) for spec in specs for entry in spec]
    for axes in dict.fromkeys(filter(None, entries)):
      doubled = []
      for x, spec in zip(jax.tree.leaves(parts), specs, strict=True):
        shape = list(x.shape)
        for i, entry in enumerate(spec):
          if core.spec_axes(entry) == axes:
            shape[i] *= 2
        doubled.append(jax.ShapeDtypeStruct(shape, x.dtype))
      tree = jax.tree.unflatten(jax.tree.structure(parts), doubled)
      longer = jax.tree.leaves(jax.eval_shape(tx.init, tree))
      if len(longer) != len(state):
        raise ValueError(
          "`tx` must have a state with as many arrays whatever the shapes of "
          f"the parameters are, got {len(state)}, and {len(longer)} for parts "
          "of twice the size."
        )
      for own, a, b in zip(divided, state, longer, strict=True):
        lengths = zip(a.shape, b.shape, strict=False)
        own += [(axes, i) for i, (n, m) in enumerate(lengths) if n != m]
    return divided

  def update(
    self,
    tx: optax.GradientTransformationExtraArgs,
    grads: PyTree,
    state: core.Split,
    parts: PyTree,
    extra_args: dict[str, Any],
  ) -> tuple[PyTree, core.Split]:
    """Runs an optimizer on this worker's parts; returns changes and a state."""
    # It raises for a transformation that looks across a leaf, such as a norm:
    # of a part it would compute something else.
    # The axes that divide each leaf of the parameters, and of the state.
    of_parts, of_state = (
      [_model_axes.sharded_axes(spec) for spec in jax.tree.leaves(one.specs())]
      for one in (self.split(parts), state)
    )
    names = core.axis_names(self.axes)
    for axes in (names, *((name,) for name in self.model.names)):
      combined = find_across(
        lambda *args: tx.update(*args, **extra_args)[0],
        (grads, state.value, parts),
        [axes[0] in dividing for dividing in (*of_parts, *of_state, *of_parts)],
        axes,
      )
      if combined:
        raise _across_error(f"`tx.update` computes {combined}")
    changes, new = tx.update(grads, state.value, parts, **extra_args)
    for (path, x), dividing in zip(
      core.named_leaves(changes), of_parts, strict=True
    ):
      if core.varying_axes(x) & ({*names, *self.model.names} - dividing):
        raise _across_error(f"`tx.update` changed `{path}`")
    return changes, self.mark(
      dataclasses.replace(state, value=new), "tx.update"
    )


def _across_error(deed: str) -> ValueError:
  """Makes the error of an optimizer that combines elements of a part."""
  return ValueError(
    "`tx` must treat every element of a leaf by itself, because each worker has"
    f" a part of a leaf only, but {deed} of a part alone: take"
    " `jaxmotion.transforms.clip_by_global_norm` for that of optax, put"
    " `jaxmotion.delayed` around `jaxmotion.sharded`, and take"
    " `jaxmotion.exchange` for optimizers that look across a leaf."
  )


def cut_leaves(
  params: PyTree, model: ModelAxes, cut_leaf: Callable[..., LeafCut]
) -> tuple[tuple[str, ...], tuple[LeafCut, ...]]:
  """Returns the path and the division of every leaf of parameters."""
  # cut_leaf: of a path, a leaf, and its dimensions that the model shards.
  named, cuts = core.named_leaves(params), []
  for (path, x), spec in zip(named, model.leaf_specs, strict=True):
    # A dimension that both cut would have its rows in another order.
    sharded = [i for i, entry in enumerate(spec) if entry is not None]
    cuts.append(cut_leaf(path, x, sharded))
  return tuple(path for path, _ in named), tuple(cuts)


# Primitives: one element of the result depends on several of an operand.
_COMBINING = (
  program.REDUCTIONS
  | program.CUMULATIVE
  | program.WINDOWS
  | frozenset(
    """
    approx_top_k cholesky conv_general_dilated custom_linear_solve dot_general
    eig eigh fft hessenberg householder_product lu qr schur sort svd top_k
    triangular_solve tridiagonal tridiagonal_solve
    """.split()
  )
)
# Mark of a value that is computed from a worker's part. Other marks name the
# primitives that combined elements of the part alone.
_FROM_PART = ""
_Marks = frozenset[str]


def find_across(
  update: Callable[..., PyTree],
  args: tuple[PyTree, ...],
  own: Sequence[bool],
  axis_name: AxisName,
) -> str:
  """Names a leaf of an update that combines elements of a part, and by what.

  >>> mean = lambda x: {"w": x - x.mean(), "b": 2 * x}
  >>> find_across(mean, (jax.numpy.ones(3),), [True], "data")
  '`w` by reduce_sum'
  """
  # `CutTree.update` refuses such an update: a sum over a worker's part is that
  # of the whole leaf only once it is added up over the workers.
  # own: for each leaf of the arguments whether it is a worker's part. Returns
  # "" if there is no such leaf.
  jaxpr, shape = jax.make_jaxpr(update, return_shape=True)(*args)
  names = set(core.axis_names(axis_name))

  def mark_results(
    step: program.Step, ins: Sequence[_Marks]
  ) -> Sequence[_Marks]:
    """Returns the marks of a step's results, from those of its operands."""
    name, marks = program.collective_name(step.name), frozenset().union(*ins)
    if name == "optimization_barrier":
      return ins  # Each result is the operand at its place.
    if name in program.COLLECTIVES and names <= set(step.axis_names):
      marks = frozenset()
    elif marks == {_FROM_PART}:
      marks |= {_first_combining(step)}  # "" is `_FROM_PART` again.
    return [marks] * len(step.outs)

  inputs = [_Marks([_FROM_PART] if is_own else []) for is_own in own]
  outputs = program.follow_marks(jaxpr, inputs, mark_results)
  for (path, _), marks in zip(core.named_leaves(shape), outputs, strict=True):
    if combining := marks - {_FROM_PART}:
      return f"`{path}` by {min(combining)}"
  return ""


def _first_combining(step: program.Step) -> str:
  """Names the first primitive of a step that combines elements; "" for none."""
  if step.name in _COMBINING:
    return step.name
  inner = (
    program.flatten(jaxpr, calls="all")
    for jaxpr in program.inner_jaxprs(step.eqn)
  )
  steps = (s for flat in inner for s in flat.steps)
  return next(filter(None, map(_first_combining, steps)), "")
