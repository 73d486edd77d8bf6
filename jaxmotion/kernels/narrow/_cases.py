"""Arrays that tests and benches share."""

from collections.abc import Callable

import jax.numpy as jnp
import numpy as np

# Of a word's lower half: ends, and both sides of the ties of every format.
_LOW = (0x0000, 0x0001, 0x1000, 0x7FFF, 0x8000, 0x8001, 0xFFFF)


def _normal(*shape: int) -> np.ndarray:
  x = np.random.default_rng(0).standard_normal(shape, dtype=np.float32)
  return x * np.float32(10)


def _patterns() -> np.ndarray:
  top = np.arange(1 << 16, dtype=np.uint32)[:, None] << np.uint32(16)
  return (top | np.array(_LOW, np.uint32)).reshape(-1).view(np.float32)


def _half(name: str) -> np.ndarray:
  dtype = jnp.dtype(name)
  some = np.arange(0, 1 << 16, 13, dtype=np.uint32).astype(np.uint16)
  # Not every NaN: XLA:CPU does not keep its bits in 16-bit values it copies.
  most = np.array(np.inf, dtype).view(np.uint16)
  numbers = some[(some & 0x7FFF) <= most].view(dtype)
  return np.concatenate([numbers, np.array([np.nan, -np.nan], dtype)])


# `patterns` has every sign, exponent and leading bits of a mantissa.
CASES: dict[str, Callable[[], np.ndarray]] = {
  "one": lambda: _normal(1),
  "scalar": lambda: _normal(),
  "odd": lambda: _normal(997),
  "matrix": lambda: _normal(3, 5, 7),
  "tile": lambda: _normal(4096),
  "past_a_tile": lambda: _normal(4097),
  "bfloat16": lambda: _half("bfloat16"),
  "float16": lambda: _half("float16"),
  "patterns": _patterns,
}
