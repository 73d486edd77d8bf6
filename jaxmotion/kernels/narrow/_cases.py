"""Test arrays of casts and truncations, shared by tests and benchmarks."""

from collections.abc import Callable

import jax.numpy as jnp
import numpy as np

# Lower halves of words: the ends, and both sides of the ties of every format.
_LOW = (0x0000, 0x0001, 0x1000, 0x7FFF, 0x8000, 0x8001, 0xFFFF)


def _normal_values(*shape: int) -> np.ndarray:
  x = np.random.default_rng(0).standard_normal(shape, dtype=np.float32)
  return x * np.float32(10)


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


# `patterns` has every sign and exponent, and all leading mantissa bits.
CASES: dict[str, Callable[[], np.ndarray]] = {
  "one": lambda: _normal_values(1),
  "scalar": lambda: _normal_values(),
  "odd": lambda: _normal_values(997),
  "matrix": lambda: _normal_values(3, 5, 7),
  "tile": lambda: _normal_values(4096),
  "past_a_tile": lambda: _normal_values(4097),
  "bfloat16": lambda: _half_floats("bfloat16"),
  "float16": lambda: _half_floats("float16"),
  "patterns": _bit_patterns,
}
