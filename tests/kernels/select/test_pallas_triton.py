import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from jax.sharding import PartitionSpec as P

from experiments.kernels.arrays import SELECTED as CASES
from jaxmotion.core import shape_dtype
from jaxmotion.kernels import select
from jaxmotion.kernels.select import (
  _pallas_triton as triton,
  _reference as reference,
)
from tests.kernels.lowering import interpret, kernel_calls, on_gpus

NAMES = pytest.mark.parametrize("case", CASES)


def same_bits(a, b):
  assert a.shape == b.shape and a.dtype == b.dtype
  np.testing.assert_array_equal(
    np.asarray(a).view(np.uint8), np.asarray(b).view(np.uint8)
  )


@functools.cache
def selected(case):
  """Returns a case's array and the elements that the reference keeps."""
  make, k, planes = CASES[case]
  x = jnp.asarray(make())
  fn = functools.partial(reference.topk_select, k=k, planes=planes)
  return x, *jax.jit(fn)(x)


@NAMES
def test_selection_is_that_of_the_reference(case):
  _, k, planes = CASES[case]
  x, *wanted = selected(case)
  got = interpret(triton.topk_select)(x, k=k, planes=planes)
  for a, b in zip(got, wanted, strict=True):
    same_bits(a, b)


_KERNEL = jax.jit(interpret(lambda x: triton.topk_select(x, k=3, planes=40)))
_REFERENCE = jax.jit(lambda x: reference.topk_select(x, k=3, planes=40))
FEW = st.sampled_from([0.0, -0.0, 1.0, -1.0, 1e-42, np.inf, np.nan, -np.nan])


@settings(max_examples=50, deadline=None, derandomize=True)
@given(st.lists(FEW, min_size=80, max_size=80))
def test_ties_are_broken_as_by_the_reference(values):
  x = jnp.asarray(values, jnp.float32)
  for a, b in zip(_KERNEL(x), _REFERENCE(x), strict=True):
    same_bits(a, b)


def both(op, values, places, x, planes):
  """Returns the results of the kernel and of the reference."""
  of = {"like": shape_dtype(x), "planes": planes}
  kernel = functools.partial(interpret(getattr(triton, op)), **of)
  wanted = jax.jit(functools.partial(getattr(reference, op), **of))
  return kernel(values, places), wanted(values, places)


FEW_CASES = ("one", "padded", "planes_in_uneven_groups", "special", "bfloat16")
SOME = pytest.mark.parametrize("case", FEW_CASES)


@SOME
def test_scattered_values_are_those_of_the_reference(case):
  x, values, places = selected(case)
  same_bits(*both("topk_scatter", values, places, x, CASES[case].planes))


# Of few values a thread holds those of four lanes, of many those of one.
@pytest.mark.parametrize(
  ("case", "workers"), [*((case, 2) for case in FEW_CASES), ("padded", 4)]
)
def test_sums_are_those_of_the_reference(case, workers):
  x, *payload = selected(case)
  values, places = (
    jnp.stack([jnp.roll(a, w, axis=1) for w in range(workers)]) for a in payload
  )
  got, wanted = both("topk_sum", values, places, x, CASES[case].planes)
  np.testing.assert_array_equal(got, wanted)
  assert got.dtype == wanted.dtype == jnp.float32


OPS = {
  "select": (
    lambda x: select.topk_select(x, 2, 50),
    [jax.ShapeDtypeStruct((1000,), jnp.float32)],
  ),
  "sum": (
    lambda v, p: select.topk_sum(v, p, jnp.zeros(1000), 50),
    [
      jax.ShapeDtypeStruct((8, 2, 20), jnp.float32),
      jax.ShapeDtypeStruct((8, 2, 20), jnp.uint32),
    ],
  ),
  "scatter": (
    lambda v, p: select.topk_scatter(v, p, jnp.zeros(1000), 50),
    [
      jax.ShapeDtypeStruct((2, 20), jnp.float32),
      jax.ShapeDtypeStruct((2, 20), jnp.uint32),
    ],
  ),
}


@pytest.mark.parametrize(("op", "gpu"), on_gpus(OPS))
def test_an_op_is_one_kernel(op, gpu, monkeypatch):
  monkeypatch.setenv("JAXMOTION_KERNELS", "pallas_triton")
  fn, args = OPS[op]
  assert kernel_calls(fn, *args, gpu=gpu) == 1


@pytest.mark.parametrize("op", OPS)
def test_an_op_is_one_kernel_for_all_rows_of_a_vmap(op, monkeypatch):
  monkeypatch.setenv("JAXMOTION_KERNELS", "pallas_triton")
  fn, args = OPS[op]
  rows = [jax.ShapeDtypeStruct((3, *a.shape), a.dtype) for a in args]
  assert kernel_calls(jax.vmap(fn), *rows) == 1


def test_rows_of_a_vmap_are_selected_by_themselves():
  x = jnp.asarray(np.random.default_rng(0).normal(size=(3, 100)), jnp.float32)
  got, wanted = (
    jax.jit(jax.vmap(functools.partial(fn, k=1, planes=9)))(x)
    for fn in (interpret(triton.topk_select), reference.topk_select)
  )
  for a, b in zip(got, wanted, strict=True):
    same_bits(a, b)


def test_workers_of_a_shard_map_select_by_themselves(monkeypatch):
  monkeypatch.setenv("JAXMOTION_KERNELS", "pallas_triton")
  mesh = jax.sharding.AbstractMesh(
    (2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,)
  )

  def fn(x):
    return jax.shard_map(
      lambda x: select.topk_select(x, 2, 50),
      mesh=mesh,
      in_specs=P("data"),
      out_specs=P(None, "data"),
    )(x)

  values, places = jax.eval_shape(fn, jnp.zeros(2000))
  assert values.shape == places.shape == (2, 40)


@pytest.mark.parametrize("k", [9, 12])
def test_more_values_than_registers_are_left_to_the_reference(k):
  with pytest.raises(NotImplementedError, match="`k` must be at most 8"):
    triton.topk_select(jnp.zeros(40), k=k, planes=20)


def test_more_payloads_than_registers_are_left_to_the_reference():
  values = jnp.zeros((11, 3, 5))
  places = values.astype(jnp.uint32)
  with pytest.raises(NotImplementedError, match="at most 32 values, got 33"):
    triton.topk_sum(values, places, like=jnp.zeros(40), planes=8)


def test_wide_floats_are_left_to_the_reference():
  x = jax.ShapeDtypeStruct((40,), jnp.dtype("float64"))
  with pytest.raises(NotImplementedError, match="32 bits, got float64"):
    triton.topk_select(x, k=1, planes=8)
