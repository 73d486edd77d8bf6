import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
import pytest
from flax import linen, nnx

from jaxmotion.core import leaf_path, named_leaves, shape_dtype


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


def test_a_leafs_path_is_the_same_inside_a_map():
  tree = {"a": [1.0, Layer(2.0, 3.0)]}
  mapped = jax.tree.map_with_path(lambda p, _: leaf_path(p), tree)
  assert jax.tree.leaves(mapped) == [path for path, _ in named_leaves(tree)]


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
  boxed = linen.Dense(
    2, kernel_init=linen.with_partitioning(linen.initializers.ones, ("a", "b"))
  )
  return jax.eval_shape(boxed.init, jax.random.key(0), jnp.ones((1, 2)))


def _nnx():
  model = nnx.eval_shape(
    lambda: nnx.Sequential(nnx.Linear(2, 2, rngs=nnx.Rngs(0)))
  )
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
  assert (
    shape_dtype(x)
    == shape_dtype(shape_dtype(x))
    == jax.ShapeDtypeStruct((2, 0, 3), "bfloat16")
  )
