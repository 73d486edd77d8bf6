from typing import NamedTuple

import jax
import jax.numpy as jnp
import pytest

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


def test_shape_dtype_has_no_data():
  x = jnp.zeros((2, 0, 3), jnp.bfloat16)
  assert (
    shape_dtype(x)
    == shape_dtype(shape_dtype(x))
    == jax.ShapeDtypeStruct((2, 0, 3), "bfloat16")
  )
