import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.kernels.arrays import NARROW as CASES
from jaxmotion import codecs
from jaxmotion.core import shape_dtype
from jaxmotion.kernels import narrow
from jaxmotion.kernels.narrow import (
  _pallas_triton as triton,
  _reference as reference,
)
from tests.kernels.lowering import interpret, kernel_calls, on_gpus

FORMATS = pytest.mark.parametrize(
  "dtype", ["bfloat16", "float16", "float8_e4m3fn", "float8_e5m2"]
)

CAST_ENCODE = jax.jit(reference.cast_encode, static_argnames="dtype")
TRUNCATE_ENCODE = jax.jit(
  reference.truncate_encode, static_argnames=("bytes", "rounding")
)


def word(dtype):
  return np.uint8 if jnp.dtype(dtype).itemsize == 1 else np.uint16


def bits(a):
  if a.dtype.itemsize == 2 and jnp.issubdtype(a.dtype, jnp.floating):
    # XLA:CPU does not keep those of a NaN in what it copies.
    a = np.array(a)
    with np.errstate(invalid="ignore"):
      a[np.isnan(a)] = np.nan
  return np.asarray(a).view(f"u{a.dtype.itemsize}")


def check(op, *args, **static):
  """Holds the kernel to the reference and returns what both make."""
  results = [
    jax.jit(functools.partial(fn, **static))(*args)
    for fn in (getattr(reference, op), interpret(getattr(triton, op)))
  ]
  for a, b in zip(*map(jax.tree.leaves, results), strict=True):
    assert a.dtype == b.dtype and a.shape == b.shape
    np.testing.assert_array_equal(bits(b), bits(a))
  return results[0]


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
  words = CAST_ENCODE(x, dtype="float16")
  total = check("cast_sum", words, like=target, dtype="float16")
  assert total.dtype == jnp.float32
  planes = TRUNCATE_ENCODE(x, bytes=3, rounding="zero")
  check("truncate_sum", planes, like=target)


def test_a_batch_is_as_each_of_its_arrays():
  x = np.stack([np.asarray(CASES["odd"]()) * i for i in range(3)])
  encode = functools.partial(interpret(triton.cast_encode), dtype="float8_e5m2")
  np.testing.assert_array_equal(
    jax.jit(jax.vmap(encode))(x), CAST_ENCODE(x, dtype="float8_e5m2")
  )


@pytest.mark.parametrize(
  ("form", "gpu"),
  on_gpus(
    [
      ("bfloat16", 8192),
      ("float16", 8192),
      ("float8_e4m3fn", 8192),
      ("float8_e5m2", 8192),
      ("bfloat16", 1001),
    ]
  ),
)
def test_a_cast_and_its_inverses_are_one_kernel_each(form, gpu):
  dtype, size = form
  x = jnp.zeros(size)
  words = jnp.zeros((9, size), word(dtype))

  def four(x, words):
    yield triton.cast_encode(x, dtype=dtype)
    yield triton.cast_decode(words[0], like=x, dtype=dtype)
    yield triton.cast_sum(words[:2], like=x, dtype=dtype)
    yield triton.cast_sum(words, like=x, dtype=dtype)

  assert kernel_calls(lambda *a: list(four(*a)), x, words, gpu=gpu) == 4


@pytest.mark.parametrize(("count", "gpu"), on_gpus([1, 2, 3, 4]))
def test_a_truncation_and_its_inverses_are_one_kernel_each(count, gpu):
  x = jnp.zeros(8192)
  planes = (jnp.zeros((2, 8192), jnp.uint8),) * count

  def four(x, planes):
    for rounding in ("zero", "nearest"):
      yield triton.truncate_encode(x, bytes=count, rounding=rounding)
    yield triton.truncate_decode(tuple(p[0] for p in planes), like=x)
    yield triton.truncate_sum(planes, like=x)

  assert kernel_calls(lambda *a: list(four(*a)), x, planes, gpu=gpu) == 4


def test_a_batch_is_one_kernel():
  encode = functools.partial(triton.cast_encode, dtype="bfloat16")
  assert kernel_calls(jax.vmap(encode), jnp.zeros((3, 4096))) == 1


def test_a_shard_s_encoding_and_sum_are_one_kernel_each():
  def both(x, words):
    return (
      triton.cast_encode(x, dtype="float8_e5m2"),
      triton.cast_sum(words, like=x, dtype="float16"),
    )

  shard = jax.P("x")
  sharded = jax.shard_map(
    both, in_specs=(shard, jax.P(None, "x")), out_specs=(shard, shard)
  )
  words = jnp.zeros((2, 1000), jnp.uint16)
  assert kernel_calls(sharded, jnp.zeros(1000), words) == 2


def test_what_does_not_fit_is_refused():
  def traced(shape):
    encode = functools.partial(triton.cast_encode, dtype="bfloat16")
    return jax.eval_shape(encode, jax.ShapeDtypeStruct(shape, jnp.float32))

  for shape in ((2**31 - 1,), (3, 0)):
    with pytest.raises(NotImplementedError, match="arrays must have 1 to "):
      traced(shape)
  with pytest.raises(NotImplementedError, match="32 bits, got float64"):
    triton.cast_encode(np.zeros(4), dtype="bfloat16")


X = jnp.zeros(4096)
WORDS = jnp.zeros((2, 4096), jnp.uint16)
PLANES = (jnp.zeros((2, 4096), jnp.uint8),) * 3
FIRST = tuple(p[0] for p in PLANES)
OPS = {
  "cast_encode": (X, "bfloat16"),
  "cast_decode": (WORDS[0], shape_dtype(X), "bfloat16"),
  "cast_sum": (WORDS, shape_dtype(X), "bfloat16"),
  "truncate_encode": (X, 3),
  "truncate_decode": (FIRST, shape_dtype(X)),
  "truncate_sum": (PLANES, shape_dtype(X)),
}


@pytest.mark.parametrize("op", OPS)
def test_kernels_run_if_named_and_not_otherwise(op):
  x, *others = OPS[op]

  def calls(implementation):
    return kernel_calls(
      lambda x: getattr(narrow, op)(x, *others, implementation=implementation),
      x,
    )

  assert calls("pallas_triton") == 1
  assert calls(None) == 0


@pytest.mark.parametrize(
  "codec", [codecs.cast("float8_e5m2"), codecs.truncate(bytes=2)]
)
def test_codecs_run_what_the_environment_names(codec, monkeypatch):
  payload = codec.encode(X)[0]
  both = jax.tree.map(lambda a: jnp.stack([a, a]), payload)
  monkeypatch.setenv("JAXMOTION_KERNELS", "pallas_triton")
  assert kernel_calls(lambda x: codec.encode(x)[0], X) == 1
  assert kernel_calls(lambda p: codec.decode(p, X), payload) == 1
  assert kernel_calls(lambda p: codec.sum_decoded(p, X), both) == 1
