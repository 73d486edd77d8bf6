"""Compiled programs of one generated exchange."""

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

import jaxmotion
from experiments.fuzz import exchange_setups
from jaxmotion import codecs, make_key, wire
from jaxmotion.codecs.extend import Division, partition
from jaxmotion.collectives.extend import (
  choose_methods,
  find_division,
  part_like,
  row_like,
  shard_like,
)

PyTree = Any


class Result(NamedTuple):
  """Results of one update.

  Attributes:
    y: updates, one array for each leaf.
    copies: number of different bit patterns that workers hold of them.
    state: state after the update.
  """

  y: dict[str, np.ndarray]
  copies: int
  state: Any


class Programs:
  """The compiled update of an exchange, and what belongs to it.

  Attributes:
    setup: the exchange.
    start: state before the first update.
    divided: arrays that the tree (or its shards) is encoded as, for each level.
    methods: method that reduces each array, for each level.
    traced_bytes: bytes of the traced update, for each level.
    compiled_bytes: bytes of the compiled update, for each level.
  """

  def __init__(self, setup: exchange_setups.Setup) -> None:
    self.setup = setup
    self._models: dict[int, Any] = {}
    axes: Any = "host"
    if setup.devices:
      axes = jaxmotion.HostAxes("host", "device")
    shape = (setup.hosts, setup.devices) if setup.devices else (setup.hosts,)
    devices = np.array(jax.devices()[: setup.workers]).reshape(shape)
    self._mesh = Mesh(devices, ("host", "device")[: len(shape)])
    self._split = P(self._mesh.axis_names)
    self._tx = jaxmotion.exchange(
      axes,
      setup.codec,
      op=setup.op,
      method=setup.method,
      nonfinite=setup.nonfinite,
      seed=setup.seed,
      local_codec=setup.local_codec,
    )
    self.start, self._step = self._build(axes)
    args = self._place(
      jax.tree.map(
        lambda a: np.zeros((setup.workers, *a.shape), a.dtype), setup.likes
      ),
      self.start,
      np.ones(setup.workers, np.float32),
      0,
    )
    self._compiled = self._step.lower(*args).compile()
    levels = range(len(setup.levels))
    branch = (lambda i: i) if len(setup.levels) > 1 else (lambda i: None)
    self.traced_bytes = [
      wire.step_bytes(self._step, *args, branch=branch(i)) for i in levels
    ]
    self.compiled_bytes = [
      wire.compiled_bytes(self._compiled, branch=branch(i)) for i in levels
    ]
    shards = jax.tree.map(
      lambda a: shard_like(a, max(setup.devices, 1)), setup.likes
    )
    trees = shards if setup.devices else setup.likes
    self.divided = [partition(codec, trees) for codec in setup.levels]
    self.methods = [
      choose_methods(d, setup.hosts, setup.method) for d in self.divided
    ]

  def update(
    self, x: PyTree, state: Any, weights: np.ndarray, level: int
  ) -> Result:
    """Runs one update on the workers."""
    # `weights`: float32[workers].
    y, state = self._compiled(*self._place(x, state, weights, level))
    copies = {
      tuple(
        np.asarray(a.addressable_shards[i].data).tobytes()
        for a in jax.tree.leaves(y)
      )
      for i in range(self.setup.workers)
    }
    return Result(jax.tree.map(np.asarray, y), len(copies), state)

  def cached_model(self, level: int, make: Any) -> Any:
    """Returns what `make(self, level)` returned the first time."""
    if level not in self._models:
      self._models[level] = make(self, level)
    return self._models[level]

  @functools.cached_property
  def plain(self) -> Any:
    """The uncompressed collective: x (workers, ...) to its mean or sum."""
    collective = jax.lax.pmean if self.setup.op == "mean" else jax.lax.psum

    def reduce(x: PyTree) -> PyTree:
      axes = self._mesh.axis_names
      return collective(jax.tree.map(lambda a: a[0], x), axes)

    return jax.jit(
      jax.shard_map(
        reduce, mesh=self._mesh, in_specs=self._split, out_specs=P()
      )
    )

  def errors(self, state: Any) -> list[tuple[Any, Any] | None]:
    """Returns the error memory of every array, of both encodings."""
    # Each has a leading axis of workers, and that of the first encoding in two
    # phases one of shards behind it. None stands for an array without memory.
    found = self._read_errors(state.codec_state.value)
    return jax.tree.map(np.asarray, found)

  @functools.cached_property
  def _read_errors(self) -> Any:
    groups = self.divided[0].leaf_groups

    def read(states: Any) -> list[Any]:
      errors: list[Any] = []
      for group, state in zip(groups, states, strict=True):
        if not isinstance(group.codec, codecs.feedback):
          errors.append(None)
          continue
        one = jax.vmap(group.codec.error)
        if state.second == ():
          errors.append((one(state.first), None))
        else:
          errors.append((jax.vmap(one)(state.first), one(state.second)))
      return errors

    return jax.jit(read)

  def _place(
    self, x: PyTree, state: Any, weights: np.ndarray, level: int
  ) -> tuple[Any, ...]:
    split = NamedSharding(self._mesh, self._split)
    everywhere = NamedSharding(self._mesh, P())
    x, weights = jax.device_put((x, weights), split)
    return x, state, weights, jax.device_put(np.int32(level), everywhere)

  def _build(self, axes: Any) -> tuple[Any, Any]:
    """Returns the first state and the jitted update."""
    setup, tx, mesh, split = self.setup, self._tx, self._mesh, self._split
    shapes: list[Any] = []

    def note_shapes(x: PyTree) -> jax.Array:
      shapes.append(jax.tree.map(jax.typeof, tx.init(x)))
      return jnp.zeros(())

    likes = setup.likes
    jax.eval_shape(
      jax.shard_map(note_shapes, mesh=mesh, in_specs=P(), out_specs=P()), likes
    )
    specs = jaxmotion.state_specs(shapes[0], axes)
    init = jax.shard_map(tx.init, mesh=mesh, in_specs=P(), out_specs=specs)
    zeros = jax.tree.map(lambda a: np.zeros(a.shape, a.dtype), likes)

    def update(x: PyTree, state: Any, weight: Any, level: Any) -> Any:
      options: dict[str, Any] = {}
      if setup.weighted:
        options["weight"] = weight[0]
      if isinstance(setup.codec, tuple):
        options["level"] = level
      return tx.update(jax.tree.map(lambda a: a[0], x), state, **options)

    step = jax.shard_map(
      update,
      mesh=mesh,
      in_specs=(split, specs, split, P()),
      out_specs=(P(), specs),
    )
    return jax.jit(init)(zeros), jax.jit(step)


def predict_bytes(programs: Programs, level: int) -> float:
  """Returns the bytes that a worker sends between hosts, from the payloads."""
  hosts = programs.setup.hosts
  divided = programs.divided[level]
  total = 0.0
  for group, like, method in zip(
    divided.leaf_groups,
    divided.array_likes(),
    programs.methods[level],
    strict=True,
  ):
    # An exchange hands float32 to every codec that does not keep the dtype.
    wide = jnp.promote_types(like.dtype, jnp.float32)
    dtype = like.dtype if group.codec.keeps_dtype else wide
    array = jax.ShapeDtypeStruct(like.shape, dtype)
    if method == "two_phase":
      part = part_like(group.codec, array, hosts)
      total += 2 * (hosts - 1) * wire.payload_bytes(group.codec, part)
    elif method == "gather":
      total += (hosts - 1) * wire.payload_bytes(group.codec, array)
    else:
      floats = [
        a
        for a in jax.tree.leaves(group.codec.payload_like(array))
        if jnp.issubdtype(a.dtype, jnp.floating)
      ]
      size = sum(a.size * a.dtype.itemsize for a in floats)
      total += 2 * (hosts - 1) / hosts * size
  return total


def model_means(programs: Programs, level: int) -> Any:
  """Returns a jitted model of an exchange without codec state, unmapped."""
  setup, divided = programs.setup, programs.divided[level]

  @jax.jit
  def means(xs: list[Any], count: Any) -> list[Any]:
    found: list[Any] = []
    for group, x, method in zip(
      divided.leaf_groups, xs, programs.methods[level], strict=True
    ):
      if group.codec.has_state:
        found.append(None)
        continue
      path = ",".join(divided.leaves[i][0] for i in group.leaves)
      keys = [
        make_key(setup.seed, worker).fold(count).fold_path(path)
        for worker in range(setup.workers)
      ]
      if method == "two_phase":
        found.append(_model_two_phases(group.codec, x, keys))
      else:
        decoded = [_code(group.codec, *a) for a in zip(x, keys, strict=True)]
        found.append(jnp.stack(decoded).mean(0)[None])
    return found

  return means


def _code(codec: codecs.Codec, x: jax.Array, key: Any) -> jax.Array:
  return codec.decode(codec.encode(x, codec.init(x), key)[0], x)


def _model_divided(
  codec: codecs.Codec, division: Division, x: jax.Array, keys: list[Any]
) -> Any:
  workers = x.shape[0]
  payloads = [
    codec.encode(one, (), key)[0] for one, key in zip(x, keys, strict=True)
  ]
  parts = [
    jax.vmap(lambda part: codec.decode(part, division.like))(
      division.divide(payload)
    )
    for payload in payloads
  ]
  mean = jnp.stack(parts).mean(0)
  variants = []
  for factor in (1.0, 1 - 3e-6, 1 + 3e-6):
    coded = [
      _code(codec, (mean[s] * factor).astype(x.dtype), keys[s].fold(workers))
      for s in range(workers)
    ]
    variants.append(division.join_values(jnp.stack(coded)))
  return jnp.stack(variants)


def _model_two_phases(
  codec: codecs.Codec, x: jax.Array, keys: list[Any]
) -> Any:
  workers = x.shape[0]
  if division := find_division(codec, x[0], workers):
    return _model_divided(codec, division, x, keys)
  row = row_like(x[0], workers)
  flat = x.reshape(workers, -1)
  padding = workers * math.prod(row.shape) - flat.shape[1]
  rows = jnp.pad(flat, ((0, 0), (0, padding)))
  rows = rows.reshape(workers, workers, *row.shape)
  variants = []
  for factor in (1.0, 1 - 3e-6, 1 + 3e-6):
    shards = []
    for s in range(workers):
      coded = [
        _code(codec, rows[r, s], keys[r].fold(s)) for r in range(workers)
      ]
      mean = (jnp.stack(coded).mean(0) * factor).astype(x.dtype)
      shards.append(_code(codec, mean, keys[s].fold(workers)))
    joined = jnp.stack(shards).reshape(-1)[: flat.shape[1]]
    variants.append(joined.reshape(x.shape[1:]))
  return jnp.stack(variants)
