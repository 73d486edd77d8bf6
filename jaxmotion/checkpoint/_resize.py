"""Continuation of an optimizer state on other workers, or with another codec.

Law: what is still to be sent is kept. Error memory is read from the old layout,
mixed by linear weights that keep the mean over workers, and written in the new
layout. Averages of two and copies are exact but for one rounding.
"""

import dataclasses
import math
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding

from jaxmotion import core, transforms
from jaxmotion.checkpoint import _convert, _layout, _living
from jaxmotion.core import AxisName, PyTree
from jaxmotion.transforms import extend


@core.declare(
  layout=core.instance(_layout.Layout, "what `describe_state` returned"),
  mesh=core.instance(Mesh, "a jax.sharding.Mesh"),
  axis_name=core.worker_axes,
)
def saved_like(
  tx: _layout.Trained,
  params: PyTree,
  layout: _layout.Layout,
  mesh: Mesh,
  *,
  axis_name: AxisName = "data",
  specs: PyTree | None = None,
) -> PyTree:
  """Returns the shapes of a saved state, with shardings on a mesh of today.

  Give it to a checkpoint library as the target of a restore, then give what it
  restored to `resize`. No device holds more than it must: per-worker arrays are
  split over the workers of the mesh along some axis whose length they divide.

  Args:
    tx: optax chain of today, or the `init` that `make_train_step` returned. Its
      codec may be another one than the saved.
    params: pytree of parameters, or of their ShapeDtypeStructs.
    layout: what `describe_state` returned when the state was saved.
    mesh: device mesh of today.
    axis_name: the axis (or axes) of the workers.
    specs: how parameters are sharded over other axes, as `make_train_step`
      takes it; None: they are not.

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
  _, saved = _trace_both(tx, params, layout, mesh, axis_name, specs)
  specs = extend.Shardings(mesh, axis_name, specs).state(saved, params)
  return _place_like(saved, specs, layout, mesh, core.axis_names(axis_name))


def _place_like(
  saved: PyTree,
  specs: PyTree,
  layout: _layout.Layout,
  mesh: Mesh,
  workers: tuple[Any, ...],
) -> PyTree:
  """Returns shapes with shardings that split per-worker arrays if they can."""
  # specs: those that the saved state would have. Its number of workers is not
  # that of the mesh, so another dimension may have to be split.
  of_workers = {*workers, *(name for name, _ in layout.workers)}

  def place_leaf(spec: jax.P, leaf: Any) -> jax.ShapeDtypeStruct:
    """Returns a leaf's shape, split along the first axis that can be."""
    entries = list(map(core.spec_axes, spec))
    entries += [()] * (leaf.ndim - len(entries))
    used = {name for entry in entries for name in entry}
    # Axes of the model stay where they are.
    placed = [
      tuple(n for n in entry if n not in of_workers) for entry in entries
    ]
    for i, length in enumerate(leaf.shape if used & of_workers else ()):
      names = (*workers, *placed[i])
      if length and length % core.count_devices(names, mesh.shape) == 0:
        placed[i] = names
        break
    sharding = NamedSharding(mesh, jax.P(*(names or None for names in placed)))
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

  return jax.tree.map(place_leaf, jax.tree.broadcast(specs, saved), saved)


@core.declare(
  layout=core.instance(_layout.Layout, "what `describe_state` returned"),
  state=core.arrays,
  mesh=core.instance((Mesh, AbstractMesh), "a mesh of jax.sharding"),
  lost=core.sequence("workers", core.integer(0, 2**31 - 1)),
  reset_memory=core.boolean,
  axis_name=core.worker_axes,
)
def resize(
  tx: _layout.Trained,
  state: PyTree,
  params: PyTree,
  layout: _layout.Layout,
  mesh: Mesh | AbstractMesh,
  *,
  axis_name: AxisName = "data",
  specs: PyTree | None = None,
  lost: Sequence[int] = (),
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
  itself are mixed alike if they are floats. Integers and keys come from the
  nearest old worker, and keys are folded with the new worker's index.
  Momenta of `momentum_correction`, what `ef21` has sent, and whatever else
  `Codec.read_memory` returns are mixed alike. Errors of the mean, of which each
  worker keeps some for all in two phases, are added to every worker's own. Own
  parameters of `local_updates` and the gradients of a delayed step are mixed
  too, and weigh as much as their workers.

  Args:
    tx: optax chain of today, or the `init` that `make_train_step` returned.
    state: the old state, as saved or restored: arrays that all processes can
      reach, or arrays on `mesh` (see `saved_like`).
    params: pytree of parameters, or of their ShapeDtypeStructs.
    layout: what `describe_state` returned for the old state.
    mesh: device mesh of today. A `jax.sharding.AbstractMesh` leaves the result
      where it is; that of one worker makes the smallest state to save, which
      keeps only the mean.
    axis_name: the axis (or axes) of the workers.
    specs: how parameters are sharded over other axes, as `make_train_step`
      takes it; None: they are not.
    lost: numbers of old workers whose rows are not read: what only they had is
      lost. The others are mixed as a state of so many workers; as many new ones
      keep what each remembers. Of processes that died, `state` may still be on
      the old mesh. Then `mesh` must have the devices that live, in any order,
      and each keeps its own row.
    reset_memory: whether error memory starts from zero, and what was still to
      be sent is lost. Everything else, such as moments, is kept.

  Returns:
    The state of `tx` for the workers of `mesh`, placed on it.

  Raises:
    TypeError: an argument of another type.
    ValueError: the layout is not that of this chain and these parameters. The
      state is not of the layout. Error memory has no place in the new codec.
      `lost` names workers that are not there, or all, or a state of which each
      worker holds a part, as of `sharded`.

  Example:
    >>> from jaxmotion import checkpoint, codecs, transforms
    >>> tx = transforms.exchange("data", codecs.feedback(codecs.sign()))
    >>> params, mesh = jnp.zeros(2), jax.make_mesh((1,), ("data",))
    >>> state = transforms.bind_mesh(tx, mesh).init(params)
    >>> layout = checkpoint.describe_state(tx, params, mesh)
    >>> two = AbstractMesh((2,), ("data",))
    >>> state = checkpoint.resize(tx, state, params, layout, two)
    >>> state.codec_state.value[0].first.memory.value.shape
    (2, 2)
  """
  today, saved = _trace_both(tx, params, layout, mesh, axis_name, specs)
  new_layout = _layout.make_layout(today, mesh, axis_name, specs)
  converters = [
    _convert.Converter(old.made_for, like, layout, new_layout, reset_memory)
    for old, like in zip(
      extend.find_exchanges(saved), extend.find_exchanges(today), strict=True
    )
  ]
  for converter in converters:
    converter.check()
  state = _check_saved(state, saved)
  names = core.axis_names(axis_name)
  living = None
  if lost:
    old_specs = extend.Shardings(mesh, axis_name, specs).state(saved, params)
    own = _living.find_own(saved, old_specs, names)
    living = _living.find_living(state, own, layout, mesh, lost)
    saved = _living.keep_shapes(saved, own, len(living))
    converters = [one._replace(living=living) for one in converters]
  workers = core.count_devices(names, new_layout.sizes)

  def convert(state: PyTree) -> PyTree:
    """Returns the state for today's workers: one program, for any mesh."""
    if isinstance(state, transforms.FullyShardedState):
      return _convert.convert_fully_sharded(
        state, today, params, reset_memory=reset_memory
      )
    if isinstance(state, transforms.LocalState):
      divide = extend.find_maker(tx).divide
      assert divide is not None
      owners = divide(params).owners
      state = _convert.convert_local(state, owners, workers)
    if isinstance(state, extend.DelayedState):
      state = _convert.convert_delayed(state, workers)
    next_converter = iter(converters)

    def convert_node(node: Any) -> Any:
      """Returns an exchange's state or per-worker arrays for the workers."""
      if extend.is_exchange(node):
        return next(next_converter).convert(node)
      if isinstance(node, core.PerWorker):
        return core.PerWorker(
          jax.tree.map(lambda a: _convert.resize_rows(a, workers), node.value)
        )
      return node

    return jax.tree.map(
      convert_node,
      state,
      is_leaf=lambda node: (
        extend.is_exchange(node) or isinstance(node, core.PerWorker)
      ),
    )

  if isinstance(mesh, AbstractMesh):
    if living is not None:
      state = _living.take_rows(state, own, living, saved)
    state = jax.tree.map(_forget_types, state)
    with core.without_context_mesh():
      return jax.jit(convert)(state)
  # Explicit axes would want to know how every reshaped array is sharded.
  plain = Mesh(mesh.devices, mesh.axis_names)
  shardings = extend.Shardings(plain, axis_name, specs)
  old_specs = shardings.state(saved, params)
  like = _place_like(saved, old_specs, layout, plain, names)
  with core.without_context_mesh():
    if living is not None:
      state = _living.take_rows(state, own, living, like)
    else:
      state = jax.device_put(state, jax.tree.map(lambda a: a.sharding, like))
    new_specs = shardings.state(jax.eval_shape(convert, state), params)

    def place(on: Mesh) -> PyTree:
      return jax.tree.map(lambda spec: NamedSharding(on, spec), new_specs)

    state = jax.jit(convert, out_shardings=place(plain))(state)
  return jax.device_put(state, place(mesh))


def _forget_types(x: Any) -> Any:
  """Returns an array whose type does not say how explicit axes shard it."""
  sharding = getattr(x, "sharding", None)
  if not isinstance(sharding, NamedSharding):
    return x
  mesh = sharding.mesh
  if not isinstance(mesh, Mesh) or AxisType.Explicit not in mesh.axis_types:
    return x
  plain = Mesh(mesh.devices, mesh.axis_names)
  return jax.device_put(x, NamedSharding(plain, sharding.spec))


def _trace_both(
  tx: _layout.Trained,
  params: PyTree,
  layout: _layout.Layout,
  mesh: Mesh | AbstractMesh,
  axis_name: AxisName,
  specs: PyTree | None,
) -> tuple[PyTree, PyTree]:
  """Returns the shapes of the state today, and of the saved one of a layout."""
  # Raises if the layout is of another chain.
  today = extend.trace_state(tx, params, mesh, axis_name, specs)
  _check_layout(layout, _layout.make_layout(today, mesh, axis_name, specs))
  specs = extend.Shardings(mesh, axis_name, specs).specs  # without single axes
  saved_axes = tuple(name for name, _ in layout.workers)
  # The chain names today's axes. All else depends on the workers' number alone,
  # but for memory of `fully_sharded`, which depends on that of the hosts.
  axes = core.axis_names(axis_name)
  lengths = tuple(length for _, length in layout.workers)
  if len(axes) != len(lengths):
    lengths = (math.prod(lengths), *[1] * (len(axes) - 1))
  old_mesh, renamed = (
    _layout.layout_mesh(layout, workers, mesh)
    for workers in (layout.workers, tuple(zip(axes, lengths, strict=True)))
  )
  exchanges = zip(layout.exchanges, extend.find_exchanges(today), strict=True)

  def replace_node(node: Any) -> Any:
    """Returns the state that an exchange of the layout has; others stay."""
    if not extend.is_exchange(node):
      return node
    old, like = next(exchanges)
    new = like.made_for
    own = _layout.make_transformation(old, getattr(new, "tx", None))
    return extend.trace_state(own, new.params, old_mesh, saved_axes, new.specs)

  state = extend.trace_state(tx, params, renamed, axis_name, specs)
  state = jax.tree.map(replace_node, state, is_leaf=extend.is_exchange)
  if isinstance(state, transforms.FullyShardedState):
    state = state._replace(
      inner=dataclasses.replace(state.inner, axes=saved_axes),
      made_for=dataclasses.replace(state.made_for, axis_name=saved_axes),
    )
  return today, state


def _check_layout(layout: _layout.Layout, today: _layout.Layout) -> None:
  """Raises an error that says how the layouts differ, if they do."""
  counts = len(layout.exchanges), len(today.exchanges)
  if counts[0] != counts[1]:
    raise ValueError(
      f"`layout` must have the {counts[1]} exchanges of `tx`, got {counts[0]}."
    )
  if layout.model != today.model:
    raise ValueError(
      "`mesh` and `specs` must shard the model as `layout` says, over "
      f"{dict(layout.model)}, got {dict(today.model)}: only the workers may be"
      " others."
    )
  for old, new in zip(layout.exchanges, today.exchanges, strict=True):
    if old.kind != new.kind:
      raise ValueError(
        f"`layout` must be of `{new.kind}`, as `tx` has, got `{old.kind}`."
      )
    if old.op != new.op:
      raise ValueError(
        f"`layout` must have the `op` of `tx`, {new.op!r}, got {old.op!r}."
      )
    wanted, found = (
      {leaf.path: str(leaf) for leaf in one.leaves} for one in (new, old)
    )
    for path in [*wanted, *found]:
      if wanted.get(path) != found.get(path):
        raise ValueError(
          f"`layout` must be for `params`: {path!r} is "
          f"{wanted.get(path, 'not there')}, got {found.get(path, 'none')}."
        )


def _check_saved(state: PyTree, saved: PyTree) -> PyTree:
  """Returns a state as that of its layout; raises unless the shapes fit."""
  next_like = iter(extend.find_exchanges(saved))

  def check_node(node: Any) -> Any:
    """Returns an exchange's state; raises unless it is made for `layout`."""
    like = next(next_like, None) if extend.is_exchange(node) else None
    if like is None:
      return node
    # A map of one's own may have shown `init` the shards of arrays.
    leaves = getattr(node.made_for, "leaves", ())
    if node.made_for != dataclasses.replace(like.made_for, leaves=leaves):
      raise ValueError(
        f"`state` must be of `layout`, made for {like.made_for}, got one made "
        f"for {node.made_for}."
      )
    return node._replace(made_for=like.made_for)

  state = jax.tree.map(check_node, state, is_leaf=extend.is_exchange)
  if isinstance(saved, transforms.FullyShardedState):
    _check_cuts(state, saved)
  if not core.same_shapes(state, saved):
    raise ValueError(
      f"`state` must be of `layout`, with arrays {core.shape_strings(saved)}, "
      f"got {core.shape_strings(state)}."
    )
  return state


def _check_cuts(state: PyTree, saved: transforms.FullyShardedState) -> None:
  """Raises unless a state was made for these parameters and workers."""
  for field in dataclasses.fields(saved.made_for):
    name, own = field.name, getattr(saved.made_for, field.name)
    other = getattr(getattr(state, "made_for", None), name, None)
    if own != other:
      raise ValueError(
        f"`state` must be of `layout` and `params`, made for the {name} "
        f"{own!r:.200}, got {other!r:.200}: give the layout of this state, and "
        "the parameters that `jaxmotion.read_params` returns."
      )


@core.declare(state=core.arrays)
def check_workers(state: PyTree) -> None:
  """Raises if all workers have the per-worker state of one of them.

  `flax.jax_utils.unreplicate` keeps the state of the first worker, and
  `replicate` gives it to all. What the others had still to send is lost. What
  the first had is then sent by all. Call this function after you restored a
  state, or put it back by code of others. It reads the state from the device,
  once, and adds nothing to a step.

  A state that no step has changed yet is accepted: its memory is zero. Memory
  is rightly equal, and refused, where workers trained on equal batches, and
  where `resize` has just continued the state of one worker.

  Args:
    state: state of an optimizer, or of a whole training, with its `PerWorker`
      nodes. Of several processes, each looks at its own workers.

  Raises:
    TypeError: a leaf is no array with values.
    ValueError: workers share a memory that is not zero; its path is named.

  Example:
    >>> import jax.numpy as jnp
    >>> from jaxmotion import PerWorker
    >>> check_workers({"error": PerWorker(jnp.arange(3.0)[:, None])})
    >>> check_workers({"error": PerWorker(jnp.ones((3, 1)))})
    Traceback (most recent call last):
    ...
    ValueError: `state` must have error memory of each worker's own, got one \
memory for all 3 at 'error': keep per-worker state whole, also in a \
checkpoint, in the place of jax_utils.unreplicate.
  """

  def is_own(node: Any) -> bool:
    return isinstance(node, core.PerWorker)

  for path, node in jax.tree.leaves_with_path(state, is_leaf=is_own):
    if not is_own(node):
      continue
    rows = list(zip(*map(_worker_rows, jax.tree.leaves(node)), strict=False))
    memory = [a for a in rows[0] if a.dtype.kind not in "iub"] if rows else []
    if len(rows) < 2 or not any(map(np.any, memory)):
      continue
    first = [a.tobytes() for a in rows[0]]
    if all([a.tobytes() for a in row] == first for row in rows[1:]):
      raise ValueError(
        "`state` must have error memory of each worker's own, got one memory "
        f"for all {len(rows)} at {core.leaf_path(path)!r}: keep per-worker "
        "state whole, also in a checkpoint, in the place of "
        "jax_utils.unreplicate."
      )


def _worker_rows(leaf: Any) -> Iterable[np.ndarray]:
  """Returns the rows of the workers that this process has."""
  if isinstance(leaf, jax.core.Tracer | jax.ShapeDtypeStruct):
    raise TypeError(f"`state` must have arrays with values, got {leaf!r:.200}.")
  if core.is_local(leaf):
    return np.asarray(leaf)
  shards = {s.index[0].start or 0: s.data for s in leaf.addressable_shards}
  return np.concatenate([np.asarray(shards[i]) for i in sorted(shards)])
