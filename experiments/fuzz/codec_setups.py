"""Generated codecs, shapes, dtypes and elements."""

import dataclasses
import math

import jax.numpy as jnp
import numpy as np

from jaxmotion import codecs, testing

_SHAPES = ((), (1,), (2,), (5,), (20,), (31,), (33,), (65,), (128,), (300,))
_MATRICES = ((1, 7), (7, 1), (3, 4, 5), (16, 32), (9, 65), (64, 8), (2, 257))
_DTYPES = ("float32", "float32", "float32", "bfloat16", "float16", "float64")


@dataclasses.dataclass(frozen=True)
class Setup:
  """A codec and the arrays that it encodes.

  Attributes:
    codec: codec of arrays.
    shape: of each array.
    dtype: name of a floating-point dtype.
  """

  codec: codecs.Codec
  shape: tuple[int, ...]
  dtype: str


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
