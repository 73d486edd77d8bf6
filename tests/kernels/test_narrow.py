import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.kernels.arrays import NARROW as CASES
from jaxmotion.core import shape_dtype
from jaxmotion.kernels.narrow import (
  _pallas_triton as triton,
  _reference as reference,
)
from tests.kernels.lowering import check_kernel

FORMATS = pytest.mark.parametrize(
  "dtype", ["bfloat16", "float16", "float8_e4m3fn", "float8_e5m2"]
)


check = functools.partial(check_kernel, triton, reference)


def word(dtype):
  return np.uint8 if jnp.dtype(dtype).itemsize == 1 else np.uint16


@FORMATS
def test_every_pattern_has_the_word_of_the_reference(dtype):
  check("cast_encode", jnp.asarray(CASES["patterns"]()), dtype=dtype)


@FORMATS
def test_every_word_has_the_value_of_the_reference(dtype):
  words = np.arange(2 ** (8 * np.dtype(word(dtype)).itemsize))
  words = jnp.asarray(words.astype(word(dtype)))
  for out in ("float32", "bfloat16"):
    target = jax.ShapeDtypeStruct(words.shape, out)
    check("cast_decode", words, like=target, dtype=dtype)


@pytest.mark.parametrize(
  ("count", "rounding"),
  [(c, r) for c in (1, 2, 3) for r in ("zero", "nearest")] + [(4, "zero")],
)
def test_every_pattern_has_the_bytes_of_the_reference(count, rounding):
  x = jnp.asarray(CASES["patterns"]())
  planes = check("truncate_encode", x, bytes=count, rounding=rounding)
  check("truncate_decode", planes, like=shape_dtype(x))


@pytest.mark.parametrize("case", [c for c in CASES if c != "patterns"])
def test_arrays_of_any_shape_and_dtype_are_encoded_and_decoded(case):
  x = jnp.asarray(CASES[case]())
  words = check("cast_encode", x, dtype="float8_e4m3fn")
  check("cast_decode", words, like=shape_dtype(x), dtype="float8_e4m3fn")
  check("truncate_encode", x, bytes=2, rounding="zero")


@pytest.mark.parametrize(
  ("workers", "dtype"), [(1, "float32"), (3, "bfloat16"), (9, "float32")]
)
def test_sums_are_those_of_the_reference(workers, dtype):
  rng = np.random.default_rng(workers)
  x = jnp.asarray(rng.normal(size=(workers, 5, 7)), jnp.float32)
  target = jax.ShapeDtypeStruct(x.shape[1:], dtype)
  words = reference.cast_encode(x, dtype="float16")
  total = check("cast_sum", words, like=target, dtype="float16")
  assert total.dtype == jnp.float32
  planes = reference.truncate_encode(x, bytes=3, rounding="zero")
  check("truncate_sum", planes, like=target)


def test_what_does_not_fit_is_refused():
  def traced(shape):
    encode = functools.partial(triton.cast_encode, dtype="bfloat16")
    return jax.eval_shape(encode, jax.ShapeDtypeStruct(shape, jnp.float32))

  for shape in ((2**31 - 1,), (3, 0)):
    with pytest.raises(NotImplementedError, match="arrays must have 1 to "):
      traced(shape)
  with pytest.raises(NotImplementedError, match="32 bits, got float64"):
    triton.cast_encode(np.zeros(4), dtype="bfloat16")
