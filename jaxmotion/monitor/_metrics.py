"""Metrics of an optimizer state, as a flat dict of scalars."""

import dataclasses
import functools
import math
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, AxisType, Mesh, PartitionSpec as P

from jaxmotion import codecs, core, transforms, wire
from jaxmotion.checkpoint.extend import make_transformation
from jaxmotion.collectives import extend as collectives
from jaxmotion.core import Array, PyTree
from jaxmotion.transforms import extend

# Name and length of every axis of the exchanges.
_Sizes = tuple[tuple[str, int], ...]

_EXCHANGES = (
  transforms.ExchangeState,
  transforms.ShardedState,
  transforms.FullyShardedState,
)
_COUNTED = (*_EXCHANGES, transforms.LocalState, extend.DelayedState)
_SKIPPED = (*_EXCHANGES, transforms.LocalState, extend.SkipNonfiniteState)


@core.declare(
  opt_state=core.arrays,
  mesh=core.instance(
    (Mesh, AbstractMesh, type(None)), "a mesh of jax.sharding"
  ),
  sent=core.instance(
    (wire.Ledger, type(None)),
    "what `wire.step_bytes` or `wire.compiled_bytes` returned",
  ),
)
def metrics(
  opt_state: PyTree,
  mesh: Mesh | AbstractMesh | None = None,
  *,
  level: Any = None,
  sent: wire.Ledger | None = None,
) -> dict[str, Any]:
  """Returns what exchanges of an optimizer did, as scalars to log.

  Give the dict to `clu`, TensorBoard or W&B as it is. Call the function outside
  of a step, or inside of `jit`; a step that does not call it pays nothing. Of
  several processes, all have to call it.

  Args:
    opt_state: state of an optax chain with exchanges, or of `local_updates` or
      `fully_sharded`, wherever the exchanges are inside of it.
    mesh: mesh of the workers; None: the state's arrays say how many there are.
      Arrays on no mesh, such as those of NumPy, may not say it: without error
      memory, with `HostAxes` or with `specs`. There are then neither bytes
      nor error norms.
    level: int32[], the level of the last exchange, for exchanges with several
      codecs; None: it is not known.
    sent: what `wire.step_bytes` or `wire.compiled_bytes` counted once for the
      step; None: the bytes are those of the state's exchanges.

  Returns:
    Scalars by their names:

    - `step`: steps so far.
    - `exchange/updates`: updates so far, the most of any exchange.
    - `exchange/skipped`: updates that were skipped for a non-finite element; of
      `local_updates`, fragments that were not sent.
    - `exchange/wire_bytes`: bytes that one worker sends in one exchange. With
      `HostAxes` they are those between hosts. Of `local_updates` they are
      those of all fragments, in `every` steps. With `sent` they are those of
      the whole step, the mean of the loss included, on all axes.
    - `exchange/ratio`: bytes of the same exchange without codecs, divided by
      those.
    - `exchange/bits_per_element`: bits of a gradient's element, divided by the
      ratio.
    - `exchange/error_norm`: L2 norm of one worker's error memory, the root mean
      square over workers.
    - `exchange/error_norm_max`: the largest such norm of any worker.
    - `exchange/level`: the level, if it was given.

    Error norms are left out where no codec has error memory. Bytes are left out
    for several codecs without a `level`, and for `fully_sharded`, whose loss
    function decides what is sent, unless `sent` says them. What an exchange
    with a `start` sends before that is not counted. With `sent` there is no
    ratio: a count does not say what would be sent without codecs.

  Raises:
    TypeError: a leaf of `opt_state` is no array, `mesh` no mesh, `level` no
      integer scalar, or `sent` no ledger.
    ValueError: the mesh lacks an axis of an exchange, or no codec is of that
      level.

  Example:
    >>> import optax
    >>> from jaxmotion import codecs, transforms
    >>> mesh = jax.sharding.Mesh(jax.devices()[:1], ("data",))
    >>> codec = codecs.feedback(codecs.uniform(bits=8))
    >>> tx = optax.chain(transforms.exchange("data", codec), optax.adam(1e-3))
    >>> params = {"w": jnp.zeros((64, 64))}
    >>> state = transforms.bind_mesh(tx, mesh).init(params)
    >>> # One worker sends nothing: ask about four.
    >>> four = jax.sharding.AbstractMesh((4,), ("data",))
    >>> for name, value in metrics(state, four).items():
    ...   print(f"{name:25} {float(value):.4g}")
    step                      0
    exchange/updates          0
    exchange/skipped          0
    exchange/wire_bytes       6240
    exchange/ratio            3.938
    exchange/bits_per_element 8.125
    exchange/error_norm       0
    exchange/error_norm_max   0
  """
  exchanges = list(_find_nodes(opt_state, _EXCHANGES))
  known = [
    x for x in exchanges if not isinstance(x, transforms.FullyShardedState)
  ]
  if level is not None:
    levels = min((len(x.made_for.codecs) for x in known), default=math.inf)
    if isinstance(level, int) and not 0 <= level < levels:
      raise ValueError(f"`level` must be in [0, {levels}), got {level}.")
    level = collectives.as_level(level)
  steps, updates = (
    functools.reduce(jnp.maximum, [n.count for n in nodes], jnp.int32(0))
    for nodes in (_find_nodes(opt_state, _COUNTED), exchanges)
  )
  skipped = [node.skipped for node in _find_nodes(opt_state, _SKIPPED)]
  scalars: dict[str, Any] = {
    "step": steps,
    "exchange/updates": updates,
    "exchange/skipped": sum(skipped, jnp.zeros((), jnp.int32)),
  }
  sizes = _find_sizes(opt_state, known, mesh)
  if sizes is not None:
    if known and sent is None:
      scalars |= _read_traffic(known, sizes, level)
    # The mesh may be another one, which is asked about.
    own = _find_sizes(opt_state, known, None)
    squares = _error_squares(exchanges, own or sizes)
    if squares is not None:
      scalars |= {
        "exchange/error_norm": jnp.sqrt(jnp.mean(squares)),
        "exchange/error_norm_max": jnp.sqrt(jnp.max(squares)),
      }
  if sent is not None:
    scalars["exchange/wire_bytes"] = sent.total_bytes
  if level is not None:
    scalars["exchange/level"] = level
  return scalars


def _find_nodes(tree: PyTree, kinds: tuple[type, ...]) -> Iterator[Any]:
  """Yields the nodes of some classes, those inside of others too."""

  def is_other(node: Any) -> bool:  # Where the search goes on by itself.
    return node is not tree and isinstance(node, (*kinds, core.PerWorker))

  if isinstance(tree, core.PerWorker):
    return
  if isinstance(tree, kinds):
    yield tree
  for node in jax.tree.leaves(tree, is_leaf=is_other):
    if is_other(node):
      yield from _find_nodes(node, kinds)


def _find_sizes(
  opt_state: PyTree, exchanges: list[Any], mesh: Mesh | AbstractMesh | None
) -> _Sizes | None:
  """Returns the length of every axis of exchanges; None if nothing says it."""
  names = sorted({n for node in exchanges for n in node.made_for.axes})
  if mesh is not None:
    if missing := [name for name in names if name not in mesh.shape]:
      raise ValueError(
        f"`mesh` must have the axes of the exchanges of `opt_state`, {names}, "
        f"got {mesh.axis_names} without {missing}."
      )
    return tuple((name, mesh.shape[name]) for name in names)
  if core.axis_is_bound(tuple(names)):  # Inside of a map over workers.
    return tuple((name, core.axis_size(name)) for name in names)
  # Error memory has a row of each worker. Rows of several axes cannot say how
  # many there are along each, but the mesh of arrays and of tracers can.
  states = core.drop_shared([node.codec_state for node in exchanges])
  rows = [a.shape[0] for a in jax.tree.leaves(states)]
  if rows and len(names) == 1:
    return ((names[0], rows[0]),)
  for leaf in jax.tree.leaves(opt_state):
    sizes = jax.typeof(leaf).sharding.mesh.shape
    if set(names) <= set(sizes):
      return tuple((name, sizes[name]) for name in names)
  return None


def _read_traffic(
  exchanges: list[Any], sizes: _Sizes, level: Any
) -> dict[str, Any]:
  """Returns bytes and ratio of all exchanges, at a level."""
  traffic = [_count_traffic(node.made_for, sizes) for node in exchanges]
  if level is None and any(len(own.wire_bytes) > 1 for own in traffic):
    return {}
  coded: Any = sum(
    jnp.asarray(own.wire_bytes, jnp.float32)[level]
    if len(own.wire_bytes) > 1
    else own.wire_bytes[0]
    for own in traffic
  )
  plain = math.fsum(own.plain_bytes for own in traffic)
  elements = sum(own.elements for own in traffic)
  bits = sum(own.element_bits for own in traffic)
  if not plain:  # One worker sends nothing.
    return {"exchange/wire_bytes": coded}
  return {
    "exchange/wire_bytes": coded,
    "exchange/ratio": plain / coded,
    "exchange/bits_per_element": bits / elements * coded / plain,
  }


class _Traffic(NamedTuple):
  """Bytes that one worker sends in one exchange, and the elements sent."""

  wire_bytes: tuple[float, ...]  # With the codec of each level.
  plain_bytes: float  # Without codecs.
  elements: int  # Of one device.
  element_bits: int  # Bits of all these elements in their own dtypes.


# A loop asks at each step.
@functools.lru_cache(maxsize=256)
def _count_traffic(options: extend.Options, sizes: _Sizes) -> _Traffic:
  """Counts the bytes that one worker sends, from the traced exchange."""
  likes = options.shard_params(dict(sizes))
  leaves = jax.tree.leaves(likes)
  plain: dict[str, Any] = {"codec": codecs.identity(), "method": None}
  changes = [{"codec": codec} for codec in options.codecs]
  if isinstance(options, extend.ShardedOptions):
    plain = {"gradient_codec": codecs.identity(), "weight_codec": None}
    changes = [{}]
  *coded, uncoded = (
    _trace_bytes(dataclasses.replace(options, **change), likes, dict(sizes))
    for change in (*changes, plain)
  )
  return _Traffic(
    tuple(coded),
    uncoded,
    sum(math.prod(x.shape) for x in leaves),
    sum(8 * math.prod(x.shape) * x.dtype.itemsize for x in leaves),
  )


def _trace_bytes(
  options: extend.Options, likes: PyTree, sizes: dict[str, int]
) -> float:
  """Returns the bytes that one worker sends in an exchange of one level."""
  names = core.axis_names(options.axis_name)
  lengths = tuple(sizes[name] for name in names)
  mesh = AbstractMesh(lengths, names, axis_types=(AxisType.Auto,) * len(names))
  tx = make_transformation(options)

  def update(grads: PyTree) -> PyTree:
    params = jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), grads)
    own = core.to_varying(grads, names)
    return tx.update(own, tx.init(params), params)[0]

  mapped = jax.shard_map(update, mesh=mesh, in_specs=P(), out_specs=P())
  with core.without_context_mesh():
    moves = wire.step_bytes(mapped, likes).moves
  # What the devices of a host exchange stays within it.
  inner = set(core.axis_names(core.split_axes(options.axis_name)[1]))
  return math.fsum(
    move.wire_bytes for move in moves if not inner & set(move.axes)
  )


@functools.partial(jax.jit, static_argnums=1)
def _error_squares(exchanges: list[Any], sizes: _Sizes) -> Array | None:
  """Returns each worker's squared error norm, None without error memory."""
  errors: list[Array] = []
  for state in exchanges:
    if isinstance(state, transforms.FullyShardedState):
      errors += jax.tree.leaves(state.error)
    else:
      errors += _find_errors(state, dict(sizes))
  if not errors:
    return None
  return sum(
    (jnp.sum(e**2, tuple(range(1, e.ndim))) for e in errors),
    jnp.zeros(()),
  )


def _find_errors(state: Any, sizes: Mapping[str, int]) -> list[Array]:
  """Returns what is still to be sent, with a leading axis of workers."""
  options, states = state.made_for, state.codec_state.value
  if isinstance(state, transforms.ExchangeState):
    likes, layout = options.shard_params(sizes), options.state_layout(sizes)
    if (devices := layout.devices) is not None:
      likes = jax.tree.map(lambda a: collectives.shard_like(a, devices), likes)
    return collectives.read_pending(states, likes, layout)
  parts = extend.parts_layout(options, sizes)
  cut_states, whole_states = states
  errors = collectives.read_pending(
    whole_states, parts.whole, parts.whole_layout
  )
  cut = [leaf for leaf in parts.leaves if leaf[0].is_cut]
  for (_, codec, like), rows in zip(cut, cut_states, strict=True):
    by_part = collectives.read_states(codec, rows, like, 2)
    errors += [by_part[p.name] for p in codec.memory_parts if p.is_pending]
  return errors
