"""Generated codecs, held to the laws that they state.

A round draws some codecs with a shape and a dtype each. One program encodes and
decodes many arrays: extreme ones, equal ones, subnormal ones, arrays with NaN.
Then it wraps a codec in error memory for some steps, encodes a tree, and
compares a compiled call with one that is not.
"""

import contextlib
import dataclasses
import itertools
import math
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments.fuzz.rounds import Defect, Round
from jaxmotion import codecs, make_key, testing

_SHAPES = ((), (1,), (2,), (5,), (20,), (31,), (33,), (65,), (128,), (300,))
_MATRICES = ((1, 7), (7, 1), (3, 4, 5), (16, 32), (9, 65), (64, 8), (2, 257))
_DTYPES = ("float32", "float32", "float32", "bfloat16", "float16", "float64")


@dataclasses.dataclass(frozen=True)
class Setup:
  """A codec and the arrays that it encodes."""

  codec: codecs.Codec  # Codec of arrays.
  shape: tuple[int, ...]  # Of each array.
  dtype: str  # Name of a floating-point dtype.


def draw_setup(rng: np.random.Generator) -> Setup:
  """Returns a codec, a shape and a dtype."""
  shapes = _SHAPES if rng.random() < 0.6 else _MATRICES
  shape = shapes[rng.integers(len(shapes))]
  return Setup(draw_codec(rng), shape, _DTYPES[rng.integers(len(_DTYPES))])


def draw_codec(rng: np.random.Generator) -> codecs.Codec:
  """Returns a codec of arrays, without error memory."""
  kind = rng.integers(5)
  if kind == 4:
    return _draw_tiled(rng)
  if kind == 0:
    first = (_draw_sparse, _draw_rotate)[rng.integers(2)](rng)
    return codecs.chain(first, _draw_dense(rng))
  if kind == 1:
    return _draw_sparse(rng)
  return _draw_dense(rng)


def _draw_block(rng: np.random.Generator) -> int:
  return int(rng.choice((1, 2, 4, 7, 16, 33, 64, 512)))


def _draw_rotate(rng: np.random.Generator) -> codecs.Codec:
  return codecs.rotate(
    block=int(rng.choice((32, 64, 128))), seed=int(rng.integers(1 << 32))
  )


def _draw_sparse(rng: np.random.Generator) -> codecs.Codec:
  density = float(rng.choice((0.01, 0.1, 0.3, 0.5, 1.0)))
  match rng.integers(5):
    case 0:
      return codecs.topk(density=density)
    case 1:
      return codecs.topk(density=density, block=_draw_block(rng))
    case 2:
      return codecs.random_k(density=density, scaled=bool(rng.integers(2)))
    case 3:
      value = float(rng.choice((1e-3, 0.5, 2.0)))
      return codecs.threshold(value=value, capacity=density)
  return codecs.identity()


def _draw_tiled(rng: np.random.Generator) -> codecs.Codec:
  """Returns a codec of tiles or columns, as DeMo and SparseLoCo have them."""
  chunk = int(rng.choice((1, 3, 8, 16, 64)))
  fit = ("pad", "divide")[rng.integers(2)]
  shape = ("square", "row")[rng.integers(2)]
  count = int(rng.choice((1, 3, 1000)))
  columns = (
    codecs.topk_columns(count=count),
    codecs.topk_columns(density=float(rng.choice((0.01, 0.3, 1.0)))),
  )[rng.integers(2)]
  heads = (
    codecs.tiles(chunk=chunk, fit=fit, shape=shape),
    codecs.dct(chunk=chunk, fit=fit),
  )
  head = heads[rng.integers(2)]
  book = codecs.codebook(
    bits=int(rng.integers(2, 9)), span=float(rng.choice((0.5, 6.0)))
  )
  levels = codecs.lloyd_max(
    bits=int(rng.integers(1, 5)), block=_draw_block(rng)
  )
  kinds = (
    head,
    columns,
    book,
    levels,
    codecs.chain(head, columns),
    codecs.chain(_draw_rotate(rng), levels),
    codecs.chain(codecs.tiles(chunk=chunk), codecs.chain(columns, book)),
  )
  return kinds[rng.integers(len(kinds))]


def _draw_dense(rng: np.random.Generator) -> codecs.Codec:
  block = _draw_block(rng)
  match rng.integers(8):
    case 0:
      formats = ("bfloat16", "float16", "float8_e4m3fn", "float8_e5m2")
      return codecs.cast(formats[rng.integers(4)])
    case 1:
      rounding = ("zero", "nearest")[rng.integers(2)]
      return codecs.truncate(bytes=int(rng.integers(1, 5)), rounding=rounding)
    case 2 | 3:
      return codecs.uniform(
        bits=int(rng.integers(1, 9)),
        block=block,
        symmetric=bool(rng.integers(2)),
        rounding=("nearest", "stochastic")[rng.integers(2)],
      )
    case 4:
      return codecs.sign(block=block)
    case 5:
      rounding = ("stochastic", "threshold")[rng.integers(2)]
      return codecs.ternary(block=block, rounding=rounding)
    case 6:
      names = ("float8_e4m3fn", "float8_e5m2", "float6_e3m2fn", "float4_e2m1fn")
      name = (*names, "float6_e2m3fn", "float4_e3m0")[rng.integers(6)]
      return codecs.microscaling(format=name, block=block)
  if rng.random() < 0.5:
    capacity = float(rng.choice((0.3, 1.0)))
    return codecs.zero_value(capacity=capacity, tile=32)
  rounding = ("nearest", "stochastic")[rng.integers(2)]
  bits = (8, 16)[rng.integers(2)]
  return codecs.nonnegative(bits=bits, block=block, rounding=rounding)


def draw_tree_codec(rng: np.random.Generator) -> codecs.Codec:
  """Returns a codec of the trees that `draw_tree` makes."""
  inner = codecs.rules((("a", draw_codec(rng)), ("b|c", draw_codec(rng))))
  size = int(rng.choice((1, 8, 100)))
  joined = codecs.buckets(inner, max_leaf_size=size, max_bucket_size=100)
  return (inner, joined, codecs.buckets(draw_codec(rng)))[rng.integers(3)]


def draw_tree(rng: np.random.Generator) -> dict[str, np.ndarray]:
  """Returns leaves of several shapes, of float32 and float16."""
  shapes = [_SHAPES[rng.integers(len(_SHAPES))] for _ in range(3)]
  tree = {
    name: rng.normal(size=shape).astype(np.float32)
    for name, shape in zip("abc", shapes, strict=True)
  }
  return {**tree, "c": tree["c"].astype(np.float16)}


def draw_rows(setup: Setup, count: int, rng: np.random.Generator) -> np.ndarray:
  """Returns arrays of many kinds, [count, *shape]."""
  dtype = jnp.dtype(setup.dtype)
  size = math.prod(setup.shape)
  rows: list[np.ndarray] = []
  while len(rows) < count:
    base = _draw_elements(size, dtype, rng)
    rows += list(testing.make_rows(base.reshape(setup.shape)))
  return np.stack(rows[:count])


def _draw_elements(
  size: int, dtype: np.dtype, rng: np.random.Generator
) -> np.ndarray:
  """Returns finite elements within the range of float32 and the dtype."""
  most = min(float(jnp.finfo(dtype).max), float(jnp.finfo(jnp.float32).max))
  power = math.log10(most)
  x = rng.normal(size=size)
  match rng.integers(6):
    case 0:
      x *= 10.0 ** rng.uniform(-power, power - 1)
    case 1:
      x *= 10.0 ** rng.uniform(-power, power - 1, size)
    case 2:
      x = rng.integers(-2, 3, size).astype(float)
    case 3:
      x *= rng.random(size) < 0.1
    case 4:
      x = np.full(size, x[0] if size else 0.0)
  return np.clip(x, -most, most).astype(dtype)


# Arrays of one program; each is a case.
_ROWS = 126
_FEW_ROWS = 28
_STEPS = 6


def run_round(seed: int) -> Round:
  """Draws codecs and checks their laws."""
  rng = np.random.default_rng(seed)
  rounds = [check_laws(draw_setup(rng), seed) for _ in range(3)]
  setup = draw_setup(rng)
  rounds.append(check_memory(setup, seed))
  rounds.append(check_tree(draw_tree_codec(rng), seed))
  if seed % 4 == 0:
    rounds.append(check_eager(draw_codec(rng), seed))
  defects = itertools.chain.from_iterable(r.defects for r in rounds)
  return Round(sum(r.cases for r in rounds), tuple(defects))


def check_laws(setup: Setup, seed: int, count: int = _ROWS) -> Round:
  """Checks every law that a codec states, on many arrays."""
  case = f"check_laws({setup!r}, {seed}, {count})"
  rows = draw_rows(setup, count, np.random.default_rng((seed, 1)))
  with _wide_floats(setup.dtype):
    breaches = testing.find_breaches(setup.codec, jnp.asarray(rows), seed=seed)
  found = [
    Defect(law, case, f"row {row}: {detail}") for law, row, detail in breaches
  ]
  return Round(len(rows), tuple(found))


def check_memory(setup: Setup, seed: int) -> Round:
  """Checks what error feedback sends and remembers over several steps."""
  case = f"check_memory({setup!r}, {seed})"
  rng = np.random.default_rng((seed, 2))
  decay = float(rng.choice((1.0, 0.75)))
  if not setup.codec.laws.bounds_memory:
    return _check_refusal(setup.codec, case)
  codec = codecs.feedback(setup.codec, decay=decay)
  rows = draw_rows(setup, _FEW_ROWS, rng)
  given = np.stack([np.roll(rows, step, 0) for step in range(_STEPS)])
  with _wide_floats(setup.dtype):
    left, sent = _run_memory(codec, jnp.asarray(given))
  before = np.concatenate([np.zeros_like(left[:1]), left[:-1]])
  found = []
  with np.errstate(all="ignore"):
    # The memory is float32, whatever the arrays are.
    value = given.astype(np.float32).astype(np.float64) + decay * before
    scale = np.abs(value) + np.abs(sent) + np.abs(decay * before)
    whole = np.isfinite(value.astype(np.float32)) & np.isfinite(sent)
    gap = np.abs(sent + left - value) - 2.0**-21 * scale - 1e-36
    # What is beyond float32 is forgotten.
    whole &= np.abs(value - sent) < 3.4e38
    lost = whole & ~(gap <= 0)
  if not np.isfinite(left).all():
    detail = f"{(~np.isfinite(left)).sum()} elements are not finite"
    found.append(Defect("the memory stays finite", case, detail))
  if lost.any():
    step, row = np.argwhere(lost)[0][:2]
    detail = f"step {step}, row {row}: off by {gap[lost].max()}"
    law = "sent and remembered is what came and was remembered"
    found.append(Defect(law, case, detail))
  return Round(_FEW_ROWS * _STEPS, tuple(found))


def _check_refusal(codec: codecs.Codec, case: str) -> Round:
  try:
    codecs.feedback(codec)
  except ValueError as error:
    if "`codec` must" in str(error):
      return Round(1)
  law = "a codec without bounded memory is refused by name"
  return Round(1, (Defect(law, case, repr(codec)),))


def _run_memory(codec: Any, given: jax.Array) -> tuple[np.ndarray, np.ndarray]:
  """Returns the error and what was sent of every step, as float64."""
  like = jax.ShapeDtypeStruct(given.shape[2:], jnp.float32)

  def run_steps(given: jax.Array, worker: jax.Array) -> Any:
    def step(state: Any, inputs: Any) -> Any:
      x, i = inputs
      key = make_key(i, worker)
      payload, state = codec.encode(x, state, key)
      return state, (codec.error(state), codec.decode(payload, like))

    steps = jnp.arange(_STEPS, dtype=jnp.uint32)
    return jax.lax.scan(step, codec.init(given[0]), (given, steps))[1]

  workers = jnp.arange(given.shape[1], dtype=jnp.uint32)
  run = jax.jit(jax.vmap(run_steps, (1, 0), 1))
  left, sent = run(given, workers)
  return np.asarray(left, np.float64), np.asarray(sent, np.float64)


def check_tree(codec: codecs.Codec, seed: int) -> Round:
  """Checks that a tree comes back leaf by leaf, within the stated error."""
  case = f"check_tree({codec!r}, {seed})"
  tree = draw_tree(np.random.default_rng((seed, 3)))

  @jax.jit
  def trip(tree: Any, key: Any) -> Any:
    payload, _ = codec.encode(tree, codec.init(tree), key)
    return codec.decode(payload, tree)

  decoded = trip(tree, make_key(seed))
  peak = max(np.abs(a.astype(float)).max(initial=0) for a in tree.values())
  found = []
  for name, x in tree.items():
    y = np.asarray(decoded[name])
    if (y.shape, y.dtype) != (x.shape, x.dtype):
      detail = f"{name}: {x.dtype}{x.shape} became {y.dtype}{y.shape}"
      found.append(Defect("leaves keep shape and dtype", case, detail))
      continue
    error = codec.laws.error
    # What a codec of limited capacity drops is seen only in its payload.
    if error is None or _may_drop(codec):
      continue
    exact, off = np.abs(x.astype(float)), np.abs(y.astype(float) - x)
    bound = error.relative * exact + error.peak * peak + error.floor
    bound = bound * (1 + 1e-6) + float(jnp.finfo(x.dtype).eps) * np.abs(y)
    if not (off <= bound + 1e-7).all():
      detail = f"{name}: off by {off.max()}"
      found.append(Defect("leaves come back within the bound", case, detail))
  return Round(len(tree), tuple(found))


def _may_drop(codec: Any) -> bool:
  return any(word in repr(codec) for word in ("threshold(", "zero_value("))


def check_eager(codec: codecs.Codec, seed: int) -> Round:
  """Checks that a call decodes to the same array whether compiled or not."""
  case = f"check_eager({codec!r}, {seed})"
  x = jnp.asarray(
    np.random.default_rng((seed, 4)).normal(size=(5, 13)), jnp.float32
  )

  def trip(x: Any, key: Any) -> Any:
    payload, _ = codec.encode(x, codec.init(x), key)
    return codec.decode(payload, x)

  key = make_key(seed)
  eager, compiled = np.asarray(trip(x, key)), np.asarray(jax.jit(trip)(x, key))
  # Sums differ in their last bits, and what is rounded after them by a step.
  adds_up = any(word in repr(codec) for word in ("rotate", "sign", "ternary"))
  peak = np.abs(compiled).max()
  off = np.abs(eager - compiled)
  same = (off > 1e-5 * peak).mean() < 0.1 if adds_up else not off.any()
  if same:
    return Round(1)
  law = "a compiled call decodes to the same array"
  return Round(1, (Defect(law, case, f"off by {off.max()}"),))


@contextlib.contextmanager
def _wide_floats(dtype: str) -> Iterator[None]:
  """Allows float64 where it is needed."""
  if dtype != "float64":
    yield
    return
  with jax.enable_x64(True):
    yield
