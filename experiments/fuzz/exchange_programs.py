"""Generated exchanges: workers, codec, shapes, policy, values and programs."""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

import jaxmotion
from jaxmotion import codecs, make_key, wire
from jaxmotion.codecs.extend import partition
from jaxmotion.collectives import extend

_BASES = (
  codecs.identity(),
  codecs.cast("bfloat16"),
  codecs.truncate(bytes=3),
  codecs.uniform(bits=8),
  codecs.uniform(bits=8, rounding="stochastic", block=33),
  codecs.uniform(bits=4, symmetric=False, block=64),
  codecs.uniform(bits=1),
  codecs.sign(block=64),
  codecs.ternary(block=64),
  codecs.microscaling(format="float8_e4m3fn"),
  codecs.topk(density=0.1),
  codecs.topk(density=0.5, block=64),
  codecs.random_k(density=0.3),
  codecs.random_k(density=0.3, scaled=False),
  codecs.threshold(value=0.5, capacity=0.5),
  codecs.zero_value(capacity=1.0),
  codecs.chain(codecs.topk(density=0.1), codecs.uniform(bits=8)),
  codecs.chain(codecs.rotate(block=64), codecs.uniform(bits=4)),
)
_SHAPES = ((0,), (0, 3), (), (1,), (5,), (63,), (64,), (129,), (700,))
_MATRICES = ((64, 8), (13, 77), (128, 3), (3, 4, 33), (1, 300), (260, 1))
_FAMILIES = ("normal", "tiny", "large", "zeros", "sparse", "equal", "integers")


@dataclasses.dataclass(frozen=True)
class Setup:
  """One exchange of one tree; its programs serve many values."""

  hosts: int  # Workers along the axis that compresses.
  # Codec, or one for each level.
  codec: codecs.Codec | tuple[codecs.Codec, ...]
  shapes: tuple[tuple[int, ...], ...]  # Shape of each leaf.
  dtypes: tuple[str, ...]  # Dtype of each leaf.
  # Workers along the local axis; 0 for an exchange without one.
  devices: int = 0
  op: str = "mean"  # "mean" or "sum".
  method: str | None = None  # "gather", "two_phase" or None.
  nonfinite: str = "propagate"  # Policy.
  weighted: bool = False  # Whether workers have weights.
  local_codec: codecs.Codec | None = None  # Codec within a host, or None.
  seed: int = 0  # Seed of the exchange.

  @property
  def workers(self) -> int:
    """Workers of both axes."""
    return self.hosts * max(self.devices, 1)

  @property
  def levels(self) -> tuple[codecs.Codec, ...]:
    """The codec of each level."""
    return (self.codec,) if isinstance(self.codec, codecs.Codec) else self.codec

  @property
  def likes(self) -> dict[str, jax.ShapeDtypeStruct]:
    """Shape of each leaf of the tree, by its path."""
    return {
      f"leaf{i}": jax.ShapeDtypeStruct(shape, dtype)
      for i, (shape, dtype) in enumerate(
        zip(self.shapes, self.dtypes, strict=True)
      )
    }


def draw_setup(rng: np.random.Generator) -> Setup:
  """Returns an exchange of 1 to 8 workers."""
  pairs = ((1, 2), (2, 1), (2, 2), (2, 3), (3, 2), (2, 4), (4, 2))
  if rng.random() < 0.7:
    hosts, devices = int(rng.choice((1, 2, 2, 3, 4, 4, 5, 8))), 0
  else:
    hosts, devices = pairs[rng.integers(len(pairs))]
  count = int(rng.integers(1, 5))
  shapes = (*_SHAPES, *_MATRICES)
  narrow = rng.random() < 0.3
  dtypes = ("float32", "bfloat16", "float16") if narrow else ("float32",)
  return Setup(
    hosts=hosts,
    devices=devices,
    codec=_draw_codec(count, rng),
    shapes=tuple(shapes[rng.integers(len(shapes))] for _ in range(count)),
    dtypes=tuple(str(rng.choice(dtypes)) for _ in range(count)),
    op=str(rng.choice(("mean", "mean", "sum"))),
    method=(None, "gather", "two_phase")[rng.integers(3)],
    nonfinite=str(rng.choice(("propagate", "skip", "zero"))),
    weighted=bool(rng.random() < 0.4),
    local_codec=(
      codecs.uniform(bits=8) if devices and rng.random() < 0.2 else None
    ),
    seed=int(rng.integers(1 << 16)),
  )


def draw_values(
  setup: Setup, rng: np.random.Generator
) -> dict[str, np.ndarray]:
  """Returns finite values of every leaf, (workers, ...)."""
  return {
    name: _draw_leaf(
      (setup.workers, *like.shape), str(rng.choice(_FAMILIES)), rng
    ).astype(like.dtype)
    for name, like in setup.likes.items()
  }


def draw_weights(setup: Setup, rng: np.random.Generator) -> np.ndarray:
  """Returns finite weights whose sum is not zero unless all are."""
  workers = setup.workers
  kind = rng.integers(5)
  if kind == 0:
    weights = np.zeros(workers)
  elif kind == 1:
    weights = -rng.uniform(0.5, 2, workers)
  elif kind == 2 and setup.op == "mean":
    weights = rng.uniform(1e38, 3e38, workers)
  else:
    weights = rng.integers(0, 4, workers).astype(float)
  return weights.astype(np.float32)


def _draw_codec(
  leaves: int, rng: np.random.Generator
) -> codecs.Codec | tuple[codecs.Codec, ...]:
  """Returns a codec, with error memory or not, or one for each level."""

  def draw_base() -> codecs.Codec:
    return _BASES[rng.integers(len(_BASES))]

  def wrap(codec: codecs.Codec, decay: float, form: str) -> codecs.Codec:
    if not codec.laws.bounds_memory:
      return codec
    return codecs.feedback(codec, decay=decay, form=form)

  decay = (1.0, 1.0, 0.9)[rng.integers(3)]
  form = ("local", "local", "global")[rng.integers(3)]
  kind = rng.integers(8)
  if kind < 2:
    return draw_base()
  if kind < 5:
    return wrap(draw_base(), decay, form)
  if kind == 5:
    remembers = rng.random() < 0.5
    levels = [draw_base() for _ in range(rng.integers(1, 4))]
    remembers &= all(codec.laws.bounds_memory for codec in levels)
    return tuple(wrap(c, decay, form) if remembers else c for c in levels)
  if kind == 6:
    joined = codecs.buckets(draw_base(), max_leaf_size=200)
    return wrap(joined, decay, form)
  first = wrap(draw_base(), decay, form)
  # Every rule must match a leaf: one less than there are leaves, and the rest.
  named = [
    (f"{i}$", (first, draw_base())[i]) for i in range(min(leaves - 1, 2))
  ]
  return codecs.rules((*named, ("", draw_base())))


def _draw_leaf(
  shape: tuple[int, ...], family: str, rng: np.random.Generator
) -> np.ndarray:
  x = rng.normal(size=shape)
  match family:
    case "tiny":
      return x * 1e-3
    case "large":
      return x * 1e2
    case "zeros":
      return np.zeros(shape)
    case "sparse":
      return np.where(rng.random(shape) < 0.05, x, 0)
    case "equal":
      return np.full(shape, float(rng.normal()))
    case "integers":
      return np.round(x * 10)
  return x


PyTree = Any


class Result(NamedTuple):
  """Results of one update."""

  y: dict[str, np.ndarray]  # Updates, one array for each leaf.
  copies: int  # Number of different bit patterns that workers hold of them.
  state: Any  # State after the update.


class Programs:
  """The compiled update of an exchange, and what belongs to it."""

  def __init__(self, setup: Setup) -> None:
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
      lambda a: extend.shard_like(a, max(setup.devices, 1)), setup.likes
    )
    trees = shards if setup.devices else setup.likes
    # Arrays that the tree, or its shards, is encoded as, for each level.
    self.divided = [partition(codec, trees) for codec in setup.levels]
    self.methods = [
      extend.choose_methods(d, setup.hosts, setup.method) for d in self.divided
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
      part = extend.part_like(group.codec, array, hosts)
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


def _model_second_phase(
  codec: codecs.Codec,
  means: list[jax.Array],
  keys: list[Any],
  dtype: Any,
  join: Callable[[jax.Array], jax.Array],
) -> jax.Array:
  """Returns joined variants of what workers decode of their shards' means."""
  variants = []
  # A sum in another order may round to either side of a codec's threshold.
  for factor in (1.0, 1 - 3e-6, 1 + 3e-6):
    coded = [
      _code(codec, (mean * factor).astype(dtype), key.fold(len(keys)))
      for mean, key in zip(means, keys, strict=True)
    ]
    variants.append(join(jnp.stack(coded)))
  return jnp.stack(variants)


def _model_two_phases(
  codec: codecs.Codec, x: jax.Array, keys: list[Any]
) -> jax.Array:
  """Returns what workers receive if shards are reduced, then gathered."""
  workers = x.shape[0]
  if division := extend.find_division(codec, x[0], workers):
    parts = [
      jax.vmap(lambda part: codec.decode(part, division.like))(
        division.divide(codec.encode(one, (), key)[0])
      )
      for one, key in zip(x, keys, strict=True)
    ]
    means = list(jnp.stack(parts).mean(0))
    return _model_second_phase(
      codec, means, keys, x.dtype, division.join_values
    )
  row = extend.row_like(x[0], workers)
  flat = x.reshape(workers, -1)
  padding = workers * math.prod(row.shape) - flat.shape[1]
  rows = jnp.pad(flat, ((0, 0), (0, padding)))
  rows = rows.reshape(workers, workers, *row.shape)
  means = [
    jnp.stack(
      [_code(codec, rows[r, s], keys[r].fold(s)) for r in range(workers)]
    ).mean(0)
    for s in range(workers)
  ]

  def join(shards: jax.Array) -> jax.Array:
    return shards.reshape(-1)[: flat.shape[1]].reshape(x.shape[1:])

  return _model_second_phase(codec, means, keys, x.dtype, join)
