import dataclasses
import itertools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import linen, nnx

from jaxmotion.core import leaf_path, named_leaves, saturate_cast, shape_dtype


class Layer(NamedTuple):
  kernel: float
  bias: float


@pytest.mark.parametrize(
  ("tree", "paths"),
  [
    (1.0, [""]),
    ({"b": 1.0, "a": 2.0}, ["a", "b"]),
    ([1.0, (2.0, 3.0)], ["0", "1/0", "1/1"]),
    (Layer(1.0, 2.0), ["kernel", "bias"]),
    ({"a": None, "b": Layer(1.0, None)}, ["b/kernel"]),
    ({"dense/0": {"w": 1.0}}, ["dense/0/w"]),
    ({}, []),
  ],
)
def test_leaves_are_named_in_the_order_of_flattening(tree, paths):
  named = named_leaves(tree)
  assert [path for path, _ in named] == paths
  assert [leaf for _, leaf in named] == jax.tree.leaves(tree)
  mapped = jax.tree.map_with_path(lambda p, _: leaf_path(p), tree)
  assert jax.tree.leaves(mapped) == paths


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Module:
  """A module whose attributes are its leaves, as in Equinox."""

  kernel: float
  value: dict


class Memory(NamedTuple):
  count: float
  value: float


def _linen():
  ones = linen.initializers.ones
  boxed = linen.Dense(2, kernel_init=linen.with_partitioning(ones, ("a", "b")))
  return jax.eval_shape(boxed.init, jax.random.key(0), jnp.ones((1, 2)))


def _nnx():
  make = lambda: nnx.Sequential(nnx.Linear(2, 2, rngs=nnx.Rngs(0)))
  model = nnx.eval_shape(make)
  return nnx.state(model, nnx.Param)


@pytest.mark.parametrize(
  ("make", "paths"),
  [
    (_linen, ["params/bias", "params/kernel"]),
    (_nnx, ["layers/0/bias", "layers/0/kernel"]),
    (lambda: Module(1.0, {"value": 2.0}), ["kernel", "value/value"]),
    (lambda: {"memory": Memory(1.0, 2.0)}, ["memory/count", "memory"]),
  ],
)
def test_a_box_around_an_array_is_no_part_of_its_path(make, paths):
  assert [path for path, _ in named_leaves(make())] == paths


def test_shape_dtype_has_no_data():
  x = jnp.zeros((2, 0, 3), jnp.bfloat16)
  like = jax.ShapeDtypeStruct((2, 0, 3), "bfloat16")
  assert shape_dtype(x) == shape_dtype(like) == like


FLOATS = (ml_dtypes.bfloat16, np.float16, np.float32)


def test_finite_elements_stay_finite_and_others_stay_what_they_are():
  for source, target in itertools.product(FLOATS, FLOATS):
    most = float(jnp.finfo(source).max)
    x = np.array([most, -most, 1.5, 0, np.inf, -np.inf, np.nan], source)
    y = np.asarray(saturate_cast(jnp.asarray(x), target), np.float64)
    top = np.minimum(most, float(jnp.finfo(target).max)).astype(target)
    np.testing.assert_array_equal(y, [top, -top, *x[2:].astype(np.float64)])
