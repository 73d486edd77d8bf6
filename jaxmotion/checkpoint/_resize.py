"""Continuation of an optimizer state on other workers, or with another codec.

Law: what is still to be sent is kept. Error memory is read from the old layout,
mixed by linear weights that keep the mean over workers, and written in the new
layout. Averages of two and copies are exact but for one rounding.
"""

import math
from collections.abc import Iterator
from typing import Any

import jax
from jax.sharding import (
  AbstractMesh,
  AxisType,
  Mesh,
  NamedSharding,
  PartitionSpec as P,
)

from jaxmotion import core, transforms
from jaxmotion.checkpoint import _convert, _layout, _parts
from jaxmotion.core import AxisName, PyTree
from jaxmotion.transforms.extend import (
  DelayedState,
  ShardedOptions,
  Shardings,
  TracedState,
  find_maker,
  trace_state,
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
    tx: optax chain of today, or the `init` that `data_parallel`,
      `fully_sharded` or `local_updates` returned. Its codec may be another one
      than the saved.
    params: pytree of parameters, or of their ShapeDtypeStructs.
    layout: what `describe_state` returned when the state was saved.
    mesh: device mesh of today.
    axis_name: the axis (or axes) of the workers.
    specs: how parameters are sharded over other axes, as `data_parallel` takes
      it; None: they are not.

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
  core.check_instance(
    "layout", layout, _layout.Layout, "what `describe_state` returned"
  )
  core.check_instance("mesh", mesh, Mesh, "a jax.sharding.Mesh")
  today = trace_state(tx, params, mesh, axis_name, specs)
  saved = _trace_saved(tx, params, layout, today, mesh, axis_name, specs)
  shardings = Shardings(mesh, axis_name, specs)
  return _place_like(saved.state, params, mesh, axis_name, shardings)


def _place_like(
  state: PyTree,
  params: PyTree,
  mesh: Mesh,
  axis_name: AxisName,
  shardings: Shardings,
) -> PyTree:
  """Returns shapes with shardings that split per-worker arrays if they can."""
  workers = core.axis_names(axis_name)

  def size_of(names: tuple[Any, ...]) -> int:
    return math.prod(mesh.shape[name] for name in names)

  def place(spec: P, leaf: Any) -> jax.ShapeDtypeStruct:
    entries = list(map(core.spec_axes, spec))
    entries += [()] * (leaf.ndim - len(entries))
    used = {name for entry in entries for name in entry}
    # Axes of the model; then those of workers, whose number is another one.
    kept = [tuple(n for n in entry if n not in workers) for entry in entries]
    for i, n in enumerate(leaf.shape if used & set(workers) else ()):
      if n and n % size_of((*workers, *kept[i])) == 0:
        kept[i] = (*workers, *kept[i])
        break
    sharding = NamedSharding(mesh, P(*(names or None for names in kept)))
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

  specs = jax.tree.map(
    lambda spec, branch: jax.tree.map(lambda _: spec, branch),
    shardings.state(state, params),
    state,
  )
  return jax.tree.map(place, specs, state)


def resize(
  tx: _layout.Trained,
  state: PyTree,
  params: PyTree,
  layout: _layout.Layout,
  mesh: Mesh | AbstractMesh,
  *,
  axis_name: AxisName = "data",
  specs: PyTree | None = None,
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
  nearest old worker, and keys are folded with the new worker's index. So are
  momenta of `momentum_correction` and what `ef21` has sent. So are the own
  parameters of `local_updates` and the gradients of a delayed step, which weigh
  as much as their workers.

  Args:
    tx: optax chain of today, or the `init` that `data_parallel`,
      `fully_sharded` or `local_updates` returned.
    state: the old state, as saved or restored: arrays that all processes can
      reach, or arrays on `mesh` (see `saved_like`).
    params: pytree of parameters, or of their ShapeDtypeStructs.
    layout: what `describe_state` returned for the old state.
    mesh: device mesh of today. A `jax.sharding.AbstractMesh` leaves the result
      where it is; that of one worker makes the smallest state to save, which
      keeps only the mean.
    axis_name: the axis (or axes) of the workers.
    specs: how parameters are sharded over other axes, as `data_parallel` takes
      it; None: they are not.
    reset_memory: whether error memory starts from zero, and what was still to
      be sent is lost. Everything else, such as moments, is kept.

  Returns:
    The state of `tx` for the workers of `mesh`, placed on it.

  Raises:
    TypeError: an argument of another type.
    ValueError: the layout is not that of this chain and these parameters. The
      state is not of the layout. Error memory has no place in the new codec.

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
  core.check_instance(
    "layout", layout, _layout.Layout, "what `describe_state` returned"
  )
  core.check_arrays("state", state)
  core.check_instance(
    "mesh", mesh, (Mesh, AbstractMesh), "a mesh of jax.sharding"
  )
  core.check_bool("reset_memory", reset_memory)
  today = trace_state(tx, params, mesh, axis_name, specs)
  new_layout = _layout.make_layout(mesh, axis_name, specs, today.exchanges)
  saved = _trace_saved(tx, params, layout, today, mesh, axis_name, specs)
  converters = [
    _convert.Converter(
      old, new, options.params, layout, new_layout, like, reset_memory
    )
    for old, new, options, like in zip(
      layout.exchanges,
      new_layout.exchanges,
      today.exchanges,
      _find_states(today.state),
      strict=True,
    )
  ]
  for converter in converters:
    converter.check()
  _check_saved(state, saved.state)
  workers = _layout.count_workers(new_layout, core.axis_names(axis_name))

  def convert(state: PyTree) -> PyTree:
    if isinstance(state, transforms.FullyShardedState):
      if layout == new_layout and not reset_memory:
        return state
      return _convert.convert_fully_sharded(
        state,
        today.state,
        params,
        workers,
        by_device=find_maker(tx).by_device,
        reset_memory=reset_memory,
      )
    if isinstance(state, transforms.LocalState):
      divide = find_maker(tx).divide
      assert divide is not None
      state = _convert.convert_local(state, divide, workers)
    if isinstance(state, DelayedState):
      state = _convert.convert_delayed(state, workers)
    remaining = iter(converters)

    def convert_node(node: Any) -> Any:
      if _is_exchange(node):
        return next(remaining).convert(node)
      if isinstance(node, core.PerWorker):
        return core.PerWorker(
          jax.tree.map(lambda a: _parts.resize_rows(a, workers), node.value)
        )
      return node

    return jax.tree.map(convert_node, state, is_leaf=_is_node)

  if isinstance(mesh, AbstractMesh):
    state = jax.tree.map(_forget_types, state)
    with core.without_context_mesh():
      return jax.jit(convert)(state)
  # Explicit axes would want to know how every reshaped array is sharded.
  plain = Mesh(mesh.devices, mesh.axis_names)
  shardings = Shardings(plain, axis_name, specs)
  like = _place_like(saved.state, params, plain, axis_name, shardings)
  with core.without_context_mesh():
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


def _find_states(state: PyTree) -> Iterator[Any]:
  """Yields the states of exchanges inside of a state."""
  nodes = jax.tree.leaves(state, is_leaf=_is_exchange)
  return filter(_is_exchange, nodes)


def _trace_saved(
  tx: _layout.Trained,
  params: PyTree,
  layout: _layout.Layout,
  today: TracedState,
  mesh: Mesh | AbstractMesh,
  axis_name: AxisName,
  specs: PyTree | None,
) -> TracedState:
  """Returns the shapes of the saved state; raises if it is of another chain."""
  new = _layout.make_layout(mesh, axis_name, specs, today.exchanges)
  _check_exchanges(layout, new)
  old_mesh = _layout.layout_mesh(layout, layout.workers, mesh)
  saved_axes = tuple(name for name, _ in layout.workers)
  # The chain names today's axes. All else depends on the workers' number alone.
  axes = core.axis_names(axis_name)
  lengths = (_layout.count_workers(layout, saved_axes), *[1] * (len(axes) - 1))
  workers = tuple(zip(axes, lengths, strict=True))
  renamed = _layout.layout_mesh(layout, workers, mesh)
  saved = trace_state(tx, params, renamed, axis_name, specs)
  made = iter(zip(layout.exchanges, today.exchanges, strict=True))

  def replace_node(node: Any) -> Any:
    if not _is_exchange(node):
      return node
    entry, options = next(made)
    names: dict[str, Any] = dict(
      local_axis=entry.local_axis, specs=options.specs
    )
    if isinstance(entry, _layout.ShardedLayout):
      assert isinstance(options, ShardedOptions)
      own = transforms.sharded(
        entry.axis_name,
        options.tx,
        gradient_codec=entry.gradient_codec,
        weight_codec=entry.weight_codec,
        **names,
      )
    else:
      codec = entry.codecs[0] if len(entry.codecs) == 1 else entry.codecs
      how: dict[str, Any] = dict(op=entry.op, method=entry.method)
      own = transforms.exchange(entry.axis_name, codec, **how, **names)
    with core.allow_unused_rules():  # A fragment has some of the leaves alone.
      found = trace_state(own, options.params, old_mesh, saved_axes, specs)
    return found.state

  state = jax.tree.map(replace_node, saved.state, is_leaf=_is_exchange)
  return TracedState(state, saved.exchanges)


def _check_exchanges(layout: _layout.Layout, today: _layout.Layout) -> None:
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
    if type(old) is not type(new):
      kinds = [
        "sharded" if isinstance(entry, _layout.ShardedLayout) else "exchange"
        for entry in (new, old)
      ]
      raise ValueError(
        f"`layout` must be of `{kinds[0]}`, as `tx` has, got `{kinds[1]}`."
      )
    ops = getattr(new, "op", "mean"), getattr(old, "op", "mean")
    if ops[0] != ops[1]:
      raise ValueError(
        f"`layout` must have the `op` of `tx`, {ops[0]!r}, got {ops[1]!r}."
      )
    wanted, found = dict(_by_path(new)), dict(_by_path(old))
    for path in [*wanted, *found]:
      if wanted.get(path) != found.get(path):
        raise ValueError(
          f"`layout` must be for `params`: {path!r} is "
          f"{wanted.get(path, 'not there')}, got {found.get(path, 'none')}."
        )


def _by_path(
  entry: _layout.ExchangeLayout | _layout.ShardedLayout,
) -> list[tuple[str, str]]:
  """Returns words for the shape of each leaf, and how it is sharded."""
  specs = entry.specs or [()] * len(entry.leaves)
  return [
    (path, f"{dtype}{list(shape)}" + (f" sharded {P(*spec)}" if spec else ""))
    for (path, shape, dtype), spec in zip(entry.leaves, specs, strict=True)
  ]


def _check_saved(state: PyTree, saved: PyTree) -> None:
  """Raises unless a state has the shapes of its layout."""
  if not core.same_shapes(state, saved):
    raise ValueError(
      f"`state` must be of `layout`, with arrays {core.shape_strings(saved)}, "
      "got "
      f"{core.shape_strings(state)}."
    )


def _is_exchange(node: Any) -> bool:
  return isinstance(node, transforms.ExchangeState | transforms.ShardedState)


def _is_node(node: Any) -> bool:
  return _is_exchange(node) or isinstance(node, core.PerWorker)
