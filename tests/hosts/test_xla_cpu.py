"""Values that are written apart, in place, or in an order."""

import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AbstractDevice, AbstractMesh

from jaxmotion.core import _compat, varying_axes
from jaxmotion.hosts import (
  make_apart,
  schedule_after,
  take_apart,
  update_in_place,
  write_apart,
)
from tests.meshes import mesh_of

X = np.random.default_rng(0).normal(size=(64, 512)).astype(np.float32)


def add(x, target, spent, count):
  return update_in_place(lambda v, s: x + v * s["scale"], target, spent, count)


WRAPS = pytest.mark.parametrize(
  "wrap", [jax.jit, lambda f: f], ids=["jit", "eager"]
)


@WRAPS
def test_the_result_is_that_of_one_call_whatever_the_count(wrap):
  spent = {"scale": jnp.float32(2)}
  for count in (0, 1, 2**31 - 1):
    y = wrap(add)(X, jnp.ones_like(X), spent, jnp.int32(count))
    np.testing.assert_array_equal(y, X + 2)


def test_it_can_be_vmapped_and_takes_trees():
  scale = jnp.arange(3.0)
  ones = jnp.ones((3, 2))
  y = jax.vmap(add)(0 * ones, ones, {"scale": scale}, jnp.arange(3))
  np.testing.assert_array_equal(y, scale[:, None] * ones)
  swap = lambda t, _: (t[0] + t[1], t[0] - t[1])
  pair = jnp.float32(3), jnp.float32(1)
  assert update_in_place(swap, pair, (), jnp.int32(0)) == (4, 2)


def test_an_expression_that_several_read_is_computed_once_and_in_place():
  # A donated array, a cheap update of it, and three readers of the update.
  # XLA:CPU alone computes the update three times, so it copies the array first.
  def temp_bytes(update):
    def step(target, x, scale, count):
      v = update(x, target[0], {"scale": scale}, count)
      return v[None], (v.reshape(8, -1) > 0), jnp.where(v > 1, v, 0)[:, :8]

    like = jax.ShapeDtypeStruct
    numbers = like((), jnp.float32), like((), jnp.int32)
    shapes = like((1, *X.shape), X.dtype), like(X.shape, X.dtype), *numbers
    compiled = jax.jit(step, donate_argnums=0).lower(*shapes).compile()
    return compiled.memory_analysis().temp_size_in_bytes

  assert temp_bytes(add) < X.nbytes / 8
  assert temp_bytes(lambda x, v, s, _: x + v * s["scale"]) >= X.nbytes


def trace_on(platform):
  """Returns how often a function is traced in a program of such devices."""
  traced = []
  device = AbstractDevice(platform, None, platform)
  mesh = AbstractMesh((1,), ("x",), abstract_device=device)

  def double(x, spent):
    traced.append(spent)
    return 2 * x

  with jax.sharding.use_abstract_mesh(mesh):
    text = str(
      jax.make_jaxpr(lambda x, n: update_in_place(double, x, (), n))(X, 1)
    )
  return len(traced), "while" in text, "cond[" in text


def test_where_the_platform_is_known_its_function_alone_is_traced(monkeypatch):
  assert trace_on("cpu") == (1, True, False)
  assert trace_on("tpu") == (1, False, False)
  monkeypatch.setattr(_compat, "_own_platforms", lambda: {"cpu", "tpu"})
  both = jax.make_jaxpr(
    lambda x, n: update_in_place(lambda x, _: 2 * x, x, (), n)
  )
  assert "cond[" in str(both(X, 1))


@WRAPS
def test_the_result_is_that_of_a_call_on_trees_and_vmapped(wrap):
  twice = wrap(lambda t: write_apart(lambda t: {"y": t["x"] * 2}, t))
  np.testing.assert_array_equal(twice({"x": X})["y"], X * 2)
  scale = jnp.arange(64.0)
  f = lambda x, s: write_apart(lambda x: x * s + scale[0], x)
  y = wrap(jax.vmap(f))(X, scale)
  np.testing.assert_array_equal(y, X * scale[:, None])


def test_its_reader_finds_the_value_in_memory():
  def count_calls(compute):
    f = jax.jit(lambda p, x: p - compute(lambda x: jnp.where(x > 0, x, 1), x))
    return f.lower(X, X).compile().as_text().count(" call(")

  # The call of `jnp.where` inside is inlined.
  assert count_calls(lambda fn, x: fn(x)) == 0
  assert count_calls(write_apart) == 1


VALUES = np.array([-0.0, 1.0, np.nan, np.inf, 1e-42], np.float32)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "uint16", "int32"])
def test_no_bit_changes_whatever_the_token(dtype):
  x = jnp.asarray(VALUES if "float" in dtype else range(5), dtype)
  # A token may have any dtype, and no element.
  tokens = [np.full((3, 2), v, "f4") for v in (0.0, -1.0, np.nan, np.inf)]
  tokens += [np.ones(3, t) for t in ("uint8", "int32", "bfloat16", "float16")]
  tokens += [np.ones(0, "f4")]

  @jax.jit
  def schedule(x, tokens):
    empty = [schedule_after(x[:0], token) for token in tokens]
    return [schedule_after(x, token) for token in tokens], empty

  found, empty = schedule(x, tokens)
  for y in found:
    assert y.dtype == x.dtype
    assert np.asarray(y).tobytes() == np.asarray(x).tobytes()
  assert all(y.shape == (0,) for y in empty)


def all_reduces(ordered):
  """All-reduces in a compiled program that sums two arrays over workers."""

  def f(x, y):
    a = lax.psum(x, "data")
    return a, lax.psum(schedule_after(y, a) if ordered else y, "data")

  specs = dict(in_specs=jax.P("data"), out_specs=jax.P())
  program = jax.jit(jax.shard_map(f, mesh=mesh_of(2), **specs))
  text = program.lower(jnp.ones((2, 8)), jnp.ones((2, 8))).compile().as_text()
  return text.count(" all-reduce(")


def test_ordered_sums_are_not_combined():
  assert all_reduces(ordered=False) == 1
  assert all_reduces(ordered=True) == 2


def test_the_type_is_that_of_the_value_and_not_of_the_token():
  def f(x, y):
    total = lax.psum(x, "data")
    first, second = schedule_after(total, y), schedule_after(y, total)
    assert varying_axes(first) == frozenset()
    assert varying_axes(second) == frozenset({"data"})
    return first

  specs = dict(in_specs=jax.P("data"), out_specs=jax.P())
  mapped = jax.shard_map(f, mesh=mesh_of(2), **specs)
  assert jax.eval_shape(mapped, jnp.ones(4), jnp.ones(4)).shape == (2,)


def take_rows(sizes, x):
  take = lambda x, start, _, size: lax.dynamic_slice_in_dim(x, start, size)
  return take_apart(take, [(None, size) for size in sizes], x)


@WRAPS
@pytest.mark.parametrize("dtype", ["float32", "uint8"])
def test_ranges_follow_one_another(wrap, dtype):
  x = jnp.asarray(X * 100).astype(dtype)
  sizes = 3, 1, 20, 3, 1
  rows = wrap(lambda x: take_rows(sizes, x))(x)
  ends = list(itertools.accumulate(sizes))
  for row, size, end in zip(rows, sizes, ends, strict=True):
    np.testing.assert_array_equal(row, x[end - size : end])
  (nothing,) = wrap(lambda x: take_rows([0], x))(x[:0])
  assert nothing.shape == (0, 512)


def test_ranges_of_a_kind_are_read_by_one_loop():
  # A loop that reads at a known place is compiled for each place.
  def list_places(count):
    run = lambda x: [row * 2 for row in take_rows([4] * count, x)]
    text = jax.jit(run).lower(X).compile().as_text()
    return set(re.findall(r"slice=\{[^}]*\}", text))

  assert list_places(3) == list_places(9)


def test_what_is_made_apart_is_traced_once_for_arguments_of_a_type():
  shapes = []
  double = make_apart(lambda x: shapes.append(x.shape) or x * 2)
  run = jax.jit(lambda x: double(x[:4]) + double(x[4:8]) + double(x[:1]))
  np.testing.assert_array_equal(run(X), 2 * (X[:4] + X[4:8] + X[:1]))
  assert shapes == [(4, 512), (1, 512)]
