"""Continuation of an optimizer state on other workers, or with another codec.

Law: what is still to be sent is kept. Error memory is read from the old layout,
mixed by linear weights that keep the mean over workers, and written in the new
layout. Averages of two and copies are exact but for one rounding.
"""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec as P

from jaxmotion.checkpoint._layout import (
  ExchangeLayout,
  Layout,
  count_workers,
  layout_mesh,
  make_layout,
)
from jaxmotion.collectives.extend import (
  StateLayout,
  convert_states,
  forgetful_leaves,
  mix_rows,
)
from jaxmotion.core import (
  Array,
  AxisName,
  PerWorker,
  PyTree,
  axis_names,
  check_arrays,
  check_bool,
  check_instance,
  same_shapes,
  shape_strings,
  state_specs,
)
from jaxmotion.transforms import ExchangeState, ShardedState, exchange
from jaxmotion.transforms.extend import (
  ExchangeOptions,
  TracedState,
  trace_state,
)


def saved_like(
  tx: optax.GradientTransformation,
  params: PyTree,
  layout: Layout,
  mesh: Mesh,
  *,
  axis_name: AxisName = "data",
) -> PyTree:
  """Returns the shapes of a saved state, with shardings on a mesh of today.

  Give it to a checkpoint library as the target of a restore, then give what it
  restored to `resize`. No device holds more than it must: per-worker arrays are
  split over the workers of the mesh along some axis whose length they divide.

  Args:
    tx: optax chain of today. Its codec may be another one than the saved.
    params: pytree of parameters, or of their ShapeDtypeStructs.
    layout: what `describe_state` returned when the state was saved.
    mesh: device mesh of today.
    axis_name: the axis (or axes) of the workers.

  Returns:
    The tree of the saved state, of ShapeDtypeStructs with shardings.

  Raises:
    TypeError: an argument of another type.
    ValueError: the layout is not that of this chain and these parameters.

  Example:
    >>> from jaxmotion import checkpoint, codecs, transforms
    >>> tx = transforms.exchange("data", codecs.feedback(codecs.sign()))
    >>> params, four = jnp.zeros(8), AbstractMesh((4,), ("data",))
    >>> layout = checkpoint.describe_state(tx, params, four)
    >>> mesh = jax.make_mesh((1,), ("data",))
    >>> like = checkpoint.saved_like(tx, params, layout, mesh)
    >>> like.codec_state.value[0].first.memory.value.shape
    (4, 8)
  """
  check_instance("layout", layout, Layout, "what `describe_state` returned")
  check_instance("mesh", mesh, Mesh, "a jax.sharding.Mesh")
  today = trace_state(tx, params, mesh, axis_name)
  saved = _trace_saved(tx, params, layout, today, axis_name)
  return _place_like(saved.state, mesh, axis_name)


def _place_like(state: PyTree, mesh: Mesh, axis_name: AxisName) -> PyTree:
  """Returns shapes with shardings that split per-worker arrays if they can."""
  workers = math.prod(mesh.shape[name] for name in axis_names(axis_name))

  def place(spec: P, leaf: Any) -> jax.ShapeDtypeStruct:
    if spec != P():
      lengths = [i for i, n in enumerate(leaf.shape) if n and n % workers == 0]
      spec = P(*[None] * lengths[0], axis_name) if lengths else P()
    sharding = NamedSharding(mesh, spec)
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

  return jax.tree.map(place, state_specs(state, axis_name), state)


def resize(
  tx: optax.GradientTransformation,
  state: PyTree,
  params: PyTree,
  layout: Layout,
  mesh: Mesh | AbstractMesh,
  *,
  axis_name: AxisName = "data",
  reset_memory: bool = False,
) -> PyTree:
  r"""Continues a state on another number of workers, or with another codec.

  With :math:`N` old and :math:`M` new workers, new worker :math:`j` gets

  .. math::
    e'_j = \sum_r M \, \left|\left[\tfrac{j}{M}, \tfrac{j+1}{M}\right] \cap
      \left[\tfrac{r}{N}, \tfrac{r+1}{N}\right]\right| e_r

  so the mean over workers of what is remembered, which is what is still to be
  sent, stays the same: halves are averaged, doubles copied. A state that has
  the layout of today keeps its bits. Other arrays that each worker has for
  itself are mixed alike if they are floats; integers and keys come from the
  nearest old worker, and keys are folded with the new worker's index.

  Args:
    tx: optax chain of today.
    state: the old state, as saved or restored: arrays that all processes can
      reach, or arrays on `mesh` (see `saved_like`).
    params: pytree of parameters, or of their ShapeDtypeStructs.
    layout: what `describe_state` returned for the old state.
    mesh: device mesh of today. A `jax.sharding.AbstractMesh` leaves the result
      where it is; that of one worker makes the smallest state to save, which
      keeps only the mean.
    axis_name: the axis (or axes) of the workers.
    reset_memory: whether error memory starts from zero, and what was still to
      be sent is lost. Everything else, such as moments, is kept.

  Returns:
    The state of `tx` for the workers of `mesh`, placed on it.

  Raises:
    TypeError: an argument of another type.
    ValueError: the layout is not that of this chain and these parameters; the
      state is not of the layout; error memory has no place in the new codec.

  Example:
    >>> from jaxmotion import checkpoint, codecs, transforms
    >>> tx = transforms.exchange("data", codecs.feedback(codecs.sign()))
    >>> params, mesh = jnp.zeros(2), jax.make_mesh((1,), ("data",))
    >>> state = transforms.init_state(tx, params, mesh)
    >>> layout = checkpoint.describe_state(tx, params, mesh)
    >>> two = AbstractMesh((2,), ("data",))
    >>> state = checkpoint.resize(tx, state, params, layout, two)
    >>> state.codec_state.value[0].first.memory.value.shape
    (2, 2)
  """
  check_instance("layout", layout, Layout, "what `describe_state` returned")
  check_arrays("state", state)
  check_instance("mesh", mesh, (Mesh, AbstractMesh), "a mesh of jax.sharding")
  check_bool("reset_memory", reset_memory)
  today = trace_state(tx, params, mesh, axis_name)
  new_layout = make_layout(mesh, axis_name, today.exchanges)
  _check_whole(today.state, layout, new_layout)
  saved = _trace_saved(tx, params, layout, today, axis_name)
  converters = [
    _Converter(old, new, options, layout, new_layout, reset_memory)
    for old, new, options in zip(
      layout.exchanges, new_layout.exchanges, today.exchanges, strict=True
    )
  ]
  _check_saved(state, saved.state)
  workers = count_workers(new_layout, axis_names(axis_name))

  def convert(state: PyTree) -> PyTree:
    remaining = iter(converters)

    def convert_node(node: Any) -> Any:
      if isinstance(node, ExchangeState):
        return next(remaining).convert(node)
      if isinstance(node, PerWorker):
        return PerWorker(
          jax.tree.map(lambda a: _resize_rows(a, workers), node.value)
        )
      return node

    return jax.tree.map(convert_node, state, is_leaf=_is_node)

  if isinstance(mesh, AbstractMesh):
    return jax.jit(convert)(state)
  like = _place_like(saved.state, mesh, axis_name)
  state = jax.device_put(state, jax.tree.map(lambda a: a.sharding, like))
  shapes = jax.eval_shape(convert, state)
  shardings = jax.tree.map(
    lambda spec: NamedSharding(mesh, spec), state_specs(shapes, axis_name)
  )
  return jax.jit(convert, out_shardings=shardings)(state)


@dataclasses.dataclass(frozen=True)
class _Converter:
  """Converts the state of one exchange to the layout of today."""

  old: ExchangeLayout
  new: ExchangeLayout
  options: ExchangeOptions
  old_layout: Layout
  new_layout: Layout
  reset_memory: bool

  def __post_init__(self) -> None:
    if self.reset_memory or self._is_same():
      return
    # Made by a codec that remembers, continued by one that does not.
    forgetful = set(forgetful_leaves(self._params, self._target.codec))
    held = set(forgetful_leaves(self._params, self._source.codec))
    if lost := sorted(forgetful - held):
      raise ValueError(
        f"`tx` must have error memory for {lost[0]!r}, as the saved state has,"
        f" got {self._target.codec!r}. What is still to be sent would be lost:"
        " wrap the codec in `feedback`, or give reset_memory=True."
      )

  def convert(self, state: ExchangeState) -> ExchangeState:
    """Returns the state for today's workers and codec."""
    if self._is_same() and not self.reset_memory:
      return state
    codec_state = convert_states(
      state.codec_state.value,
      self._params,
      self._source,
      self._target,
      op=self.new.op,
      reset_memory=self.reset_memory,
    )
    return state._replace(codec_state=PerWorker(codec_state))

  def _is_same(self) -> bool:
    return (self.old, self.old_layout.workers) == (
      self.new,
      self.new_layout.workers,
    )

  @property
  def _params(self) -> PyTree:
    return self.options.params

  @property
  def _source(self) -> StateLayout:
    return _state_layout(self.old, self.old_layout)

  @property
  def _target(self) -> StateLayout:
    return _state_layout(self.new, self.new_layout)


def _state_layout(entry: ExchangeLayout, layout: Layout) -> StateLayout:
  workers, local_axis = count_workers(layout, entry.axis_name), entry.local_axis
  devices = None if local_axis is None else count_workers(layout, local_axis)
  return StateLayout(
    entry.codecs[0], workers, entry.method, devices, len(entry.codecs) > 1
  )


def _trace_saved(
  tx: optax.GradientTransformation,
  params: PyTree,
  layout: Layout,
  today: TracedState,
  axis_name: AxisName,
) -> TracedState:
  """Returns the shapes of the saved state; raises if it is of another chain."""
  mesh = layout_mesh(layout)
  saved_axes = tuple(name for name, _ in layout.workers)
  _check_exchanges(layout, make_layout(mesh, saved_axes, today.exchanges))
  # The chain names today's axes. All else depends on the workers' number alone.
  axes = axis_names(axis_name)
  lengths = (count_workers(layout, saved_axes), *[1] * (len(axes) - 1))
  saved = trace_state(tx, params, AbstractMesh(lengths, axes), axis_name)
  made = iter(zip(layout.exchanges, today.exchanges, strict=True))

  def replace_node(node: Any) -> Any:
    if not isinstance(node, ExchangeState):
      return node
    entry, options = next(made)
    codec = entry.codecs[0] if len(entry.codecs) == 1 else entry.codecs
    own = exchange(
      entry.axis_name,
      codec,
      op=entry.op,
      method=entry.method,
      local_axis=entry.local_axis,
    )
    return trace_state(own, options.params, mesh, saved_axes).state

  state = jax.tree.map(
    replace_node, saved.state, is_leaf=lambda n: isinstance(n, ExchangeState)
  )
  return TracedState(state, saved.exchanges)


def _check_whole(state: PyTree, old: Layout, new: Layout) -> None:
  """Raises if a state in parts would have to be cut in other parts."""

  def is_sharded(node: Any) -> bool:
    return isinstance(node, ShardedState)

  nodes = jax.tree.leaves(state, is_leaf=is_sharded)
  if old.workers != new.workers and any(map(is_sharded, nodes)):
    raise ValueError(
      f"`mesh` must have the {dict(old.workers)} workers of `layout` for a "
      f"`tx` with `sharded`, whose parts are theirs, got {dict(new.workers)}."
    )


def _check_exchanges(layout: Layout, today: Layout) -> None:
  """Raises an error that says how the layouts differ, if they do."""
  counts = len(layout.exchanges), len(today.exchanges)
  if counts[0] != counts[1]:
    raise ValueError(
      f"`layout` must have the {counts[1]} exchanges of `tx`, got {counts[0]}."
    )
  for old, new in zip(layout.exchanges, today.exchanges, strict=True):
    if new.op != old.op:
      raise ValueError(
        f"`layout` must have the `op` of `tx`, {new.op!r}, got {old.op!r}."
      )
    wanted, found = dict(_by_path(new)), dict(_by_path(old))
    for path in [*wanted, *found]:
      if wanted.get(path) != found.get(path):
        raise ValueError(
          f"`layout` must be for `params`: {path!r} is "
          f"{wanted.get(path, 'not there')}, got {found.get(path, 'none')}."
        )


def _by_path(entry: ExchangeLayout) -> list[tuple[str, str]]:
  return [
    (path, f"{dtype}{list(shape)}") for path, shape, dtype in entry.leaves
  ]


def _check_saved(state: PyTree, saved: PyTree) -> None:
  """Raises unless a state has the shapes of its layout."""
  if not same_shapes(state, saved):
    raise ValueError(
      f"`state` must be of `layout`, with arrays {shape_strings(saved)}, got "
      f"{shape_strings(state)}."
    )


def _resize_rows(rows: Array, workers: int) -> Array:
  """Returns a leaf of per-worker state for another number of workers."""
  old = rows.shape[0]
  if old == workers:
    return rows
  if jnp.issubdtype(rows.dtype, jnp.floating):
    return jnp.stack(
      [mix_rows(rows, j, workers).astype(rows.dtype) for j in range(workers)]
    )
  nearest = rows[jnp.asarray([j * old // workers for j in range(workers)])]
  if jnp.issubdtype(rows.dtype, jax.dtypes.prng_key):
    return jax.vmap(jax.random.fold_in)(nearest, jnp.arange(workers))
  return nearest


def _is_node(node: Any) -> bool:
  return isinstance(node, ExchangeState | PerWorker)
