import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from experiments.kernels.arrays import SELECTED as CASES
from jaxmotion.core import shape_dtype
from jaxmotion.kernels import select
from jaxmotion.kernels.select import (
  _pallas_triton as triton,
  _reference as reference,
)
from tests.kernels.lowering import check_kernel, interpret

check = functools.partial(check_kernel, triton, reference)


@functools.cache
def selected(case):
  """Returns a case's array and the elements that are kept of it."""
  make, k, planes = CASES[case]
  x = jnp.asarray(make())
  return x, *check("topk_select", x, k=k, planes=planes)


@pytest.mark.parametrize("case", CASES)
def test_selection_is_that_of_the_reference(case):
  selected(case)


def test_ties_are_broken_as_by_the_reference():
  few = np.float32([0.0, -0.0, 1.0, -1.0, 1e-42, np.inf, np.nan, -np.nan])
  x = jnp.asarray(np.random.default_rng(0).choice(few, 4000))
  check("topk_select", x, k=3, planes=40)


FEW_CASES = ("one", "padded", "planes_in_uneven_groups", "special", "bfloat16")


@pytest.mark.parametrize("case", FEW_CASES)
def test_scattered_values_are_those_of_the_reference(case):
  x, values, places = selected(case)
  of = {"like": shape_dtype(x), "planes": CASES[case].planes}
  check("topk_scatter", values, places, **of)


# Of few values a thread holds those of four lanes, of many those of one.
@pytest.mark.parametrize(
  ("case", "workers"), [*((case, 2) for case in FEW_CASES), ("padded", 4)]
)
def test_sums_are_those_of_the_reference(case, workers):
  x, *payload = selected(case)
  values, places = (
    jnp.stack([jnp.roll(a, w, axis=1) for w in range(workers)]) for a in payload
  )
  of = {"like": shape_dtype(x), "planes": CASES[case].planes}
  got, wanted = (
    jax.jit(functools.partial(fn, **of))(values, places)
    for fn in (interpret(triton.topk_sum), reference.topk_sum)
  )
  np.testing.assert_array_equal(got, wanted)
  assert got.dtype == wanted.dtype == jnp.float32


def test_rows_of_a_vmap_are_selected_by_themselves():
  x = jnp.asarray(np.random.default_rng(0).normal(size=(3, 100)), jnp.float32)
  got, wanted = (
    jax.jit(jax.vmap(functools.partial(fn, k=1, planes=9)))(x)
    for fn in (interpret(triton.topk_select), reference.topk_select)
  )
  for a, b in zip(got, wanted, strict=True):
    np.testing.assert_array_equal(a, b)


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


def test_what_does_not_fit_is_left_to_the_reference():
  for k in (9, 12):
    with pytest.raises(NotImplementedError, match="`k` must be at most 8"):
      triton.topk_select(jnp.zeros(40), k=k, planes=20)
  values = jnp.zeros((11, 3, 5))
  places = values.astype(jnp.uint32)
  with pytest.raises(NotImplementedError, match="at most 32 values, got 33"):
    triton.topk_sum(values, places, like=jnp.zeros(40), planes=8)
  x = jax.ShapeDtypeStruct((40,), jnp.dtype("float64"))
  with pytest.raises(NotImplementedError, match="32 bits, got float64"):
    triton.topk_select(x, k=1, planes=8)
