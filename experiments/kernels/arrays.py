"""Arrays that the kernels are checked on, by the tests and on a device."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from jaxmotion.kernels import (
  BlockOp,
  microscaling,
  quantize,
  rotate,
  sign,
  ternary,
)


def _normal(*shape: int) -> np.ndarray:
  return np.random.default_rng(0).standard_normal(shape, dtype=np.float32)


# Lower halves of words: the ends, and both sides of the ties of every format.
_LOW = (0x0000, 0x0001, 0x1000, 0x7FFF, 0x8000, 0x8001, 0xFFFF)


def _bit_patterns() -> np.ndarray:
  top = np.arange(1 << 16, dtype=np.uint32)[:, None] << np.uint32(16)
  return (top | np.array(_LOW, np.uint32)).reshape(-1).view(np.float32)


def _half_floats(name: str) -> np.ndarray:
  dtype = jnp.dtype(name)
  some = np.arange(0, 1 << 16, 13, dtype=np.uint32).astype(np.uint16)
  # One NaN of each sign: XLA:CPU does not keep NaN bits in the 16-bit floats
  # it copies.
  most = np.array(np.inf, dtype).view(np.uint16)
  numbers = some[(some & 0x7FFF) <= most].view(dtype)
  return np.concatenate([numbers, np.array([np.nan, -np.nan], dtype)])


# Arrays of casts and truncations. `patterns` has every sign and exponent, and
# all leading mantissa bits.
NARROW: dict[str, Callable[[], np.ndarray]] = {
  "one": lambda: 10 * _normal(1),
  "scalar": lambda: 10 * _normal(),
  "odd": lambda: 10 * _normal(997),
  "matrix": lambda: 10 * _normal(3, 5, 7),
  "tile": lambda: 10 * _normal(4096),
  "past_a_tile": lambda: 10 * _normal(4097),
  "bfloat16": lambda: _half_floats("bfloat16"),
  "float16": lambda: _half_floats("float16"),
  "patterns": _bit_patterns,
}


def _marked_values(dtype: Any = np.float32) -> np.ndarray:
  values = [0.0, -0.0, 1e-42, -1e-42, 0.5, -0.5, 1.0, -1.0, 3e4]
  values += [np.inf, -np.inf, np.nan, -np.nan]
  return np.array(values * 9, np.float32).astype(dtype)


# Arrays whose elements are marked; some magnitudes equal the threshold.
MARKED: dict[str, Callable[[], np.ndarray]] = {
  "one": lambda: np.ones(1, np.float32),
  "word": lambda: _normal(32),
  "odd": lambda: _normal(997),
  "tile": lambda: _normal(2048),
  "past_a_tile": lambda: _normal(2049),
  "special": lambda: _marked_values(),
  "float16": lambda: _marked_values(np.float16),
  "bfloat16": lambda: _marked_values(jnp.bfloat16),
}


class Selection(NamedTuple):
  """An array, and what to keep of its lanes."""

  make: Callable[[], np.ndarray]  # Returns the array.
  k: int  # Elements kept of a lane.
  planes: int  # Number of planes, the length of a lane.


def special_values() -> np.ndarray:
  """Returns ties, signed zeros, subnormals and NaN in lanes of 12."""
  # One lane has padding.
  rng = np.random.default_rng(0)
  x = rng.standard_normal((8, 12), dtype=np.float32)
  x[1] = rng.integers(-2, 3, 12)
  x[2] = 0.0
  x[3] = [0.0, -0.0] * 6
  x[4, 2:7] = [np.nan, np.inf, -np.inf, -np.nan, np.nan]
  x[5] = 1e-42 * rng.integers(-5, 6, 12)
  x[6] = -1.0
  x[7] = 3.0
  return x.T.reshape(-1)[:-5]


SELECTED = {
  "one": Selection(lambda: _normal(1), 1, 1),
  "all": Selection(lambda: _normal(5, 5), 5, 5),
  "padded": Selection(lambda: _normal(997), 1, 10),
  "mostly_padding": Selection(lambda: _normal(11), 2, 8),
  "planes_in_flight": Selection(lambda: _normal(23, 33), 2, 23),
  "many_planes": Selection(lambda: _normal(128, 16), 2, 128),
  "planes_in_uneven_groups": Selection(lambda: _normal(71, 13), 3, 71),
  "past_a_tile": Selection(lambda: _normal(5, 515), 1, 5),
  "special_first": Selection(special_values, 1, 12),
  "special": Selection(special_values, 8, 12),
  "bfloat16": Selection(lambda: _normal(40, 24).astype(jnp.bfloat16), 1, 40),
  "float16": Selection(lambda: _normal(40, 24).astype(np.float16), 1, 40),
}


class Encoding(NamedTuple):
  """An op and the form of an array to encode with it."""

  op: BlockOp  # The quantizer.
  shape: tuple[int, ...] = (16, 64)  # Shape of the array.
  dtype: str = "float32"  # Dtype of the array.
  # Whether the array has NaN, infinities, subnormals and huge values.
  special: bool = False

  def array(self, seed: int = 0) -> np.ndarray:
    """Returns normal values, of magnitudes that differ from block to block."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=self.shape) * 10.0 ** rng.integers(-3, 4, self.shape)
    flat = x.astype(np.float32).reshape(-1)
    if self.special:
      places = flat[7 :: flat.size // 8]
      some = [np.nan, np.inf, -np.inf, 1e-42, -3e38, 2.0**127, -0.0]
      places[: len(some)] = some[: len(places)]
    return flat.reshape(self.shape)


_absmax = functools.partial(quantize.AbsmaxOp, block=32)
_minmax = functools.partial(quantize.MinMaxOp, block=32)
_ternary = functools.partial(ternary.TernaryOp, block=32)
_mx = functools.partial(microscaling.MicroscalingOp, block=32)
_rotate = functools.partial(rotate.RotateOp, length=32, seed=3)

ENCODED = {
  **{f"absmax{n}": Encoding(_absmax(bits=n)) for n in (1, 3, 4, 8)},
  **{f"minmax{n}": Encoding(_minmax(bits=n)) for n in (2, 7)},
  "absmax8_stochastic": Encoding(_absmax(bits=8, stochastic=True)),
  "minmax3_stochastic": Encoding(_minmax(bits=3, stochastic=True)),
  "absmax8_special": Encoding(_absmax(bits=8), special=True),
  "minmax8_special": Encoding(_minmax(bits=8), special=True),
  "absmax4_bfloat16": Encoding(_absmax(bits=4), dtype="bfloat16"),
  # Blocks of 58 elements, padding at the end, tiles that exceed both.
  "absmax8_odd": Encoding(_absmax(bits=8, block=64), (37, 29)),
  "minmax6_odd": Encoding(_minmax(bits=6, block=64), (37, 29)),
  "absmax8_vector": Encoding(_absmax(bits=8), (1000,)),
  "absmax8_groups": Encoding(_absmax(bits=8, block=16), (96, 64)),
  "sign": Encoding(sign.SignOp(block=32), (32, 64)),
  "sign_groups": Encoding(sign.SignOp(block=8), (96, 64)),
  "ternary": Encoding(_ternary(), (20, 64)),
  "ternary_odd": Encoding(_ternary(), (37, 29)),
  "ternary_threshold": Encoding(_ternary(stochastic=False), (20, 64)),
  **{f"mx_{n}": Encoding(_mx(format=n)) for n in microscaling.FORMATS},
  "mx_special": Encoding(_mx(format="float4_e2m1fn"), special=True),
  "rotated_absmax4": Encoding(_rotate(op=_absmax(bits=4, block=128))),
  "rotated_mx4": Encoding(_rotate(op=_mx(format="float4_e2m1fn"))),
}
