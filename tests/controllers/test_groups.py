import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxmotion.controllers import group_by, group_norms


class Block(nnx.Module):
  def __init__(self, rngs):
    self.conv = nnx.Conv(2, 2, (3, 3), rngs=rngs)
    self.norm = nnx.BatchNorm(2, rngs=rngs)


class Net(nnx.Module):
  def __init__(self, rngs):
    self.stem = nnx.Linear(2, 2, rngs=rngs)
    self.blocks = nnx.List([Block(rngs) for _ in range(2)])


RNG = np.random.default_rng(0)
PARAMS = jax.tree.map(
  lambda x: jnp.asarray(RNG.normal(size=x.shape), x.dtype),
  nnx.eval_shape(lambda: nnx.state(Net(nnx.Rngs(0)), nnx.Param)),
)
LAYERS = [("bias|scale", None), (r"(.*)/kernel", r"\1")]
BLOCKS = [(r"(blocks/\d+)/", r"\1"), (r"(.*?)/", r"\1")]


def test_a_group_of_every_layer_or_building_block():
  layers, blocks = (group_by(PARAMS, rules) for rules in (LAYERS, BLOCKS))
  assert layers.names == ("blocks/0/conv", "blocks/1/conv", "stem")
  assert len(layers.of_leaf) == len(jax.tree.leaves(PARAMS))
  assert layers.of_leaf.count(None) == len(layers.of_leaf) - 3
  assert blocks.names == ("blocks/0", "blocks/1", "stem")
  assert blocks.of_leaf == (0, 0, 0, 0, 1, 1, 1, 1, 2, 2)


@pytest.mark.parametrize("rules", [LAYERS, BLOCKS])
def test_norms_are_those_of_all_values_of_a_group(rules):
  groups = group_by(PARAMS, rules)
  norms = jax.jit(group_norms, static_argnums=1)(PARAMS, groups)
  joined = [
    np.concatenate([np.asarray(x, np.float64).reshape(-1) for x in part])
    for part in groups.split(PARAMS)
  ]
  assert norms.shape == (3,) and norms.dtype == jnp.float32
  expected = [np.linalg.norm(x) for x in joined]
  np.testing.assert_allclose(norms, expected, rtol=1e-6)


def test_norms_are_of_float32_and_resolve_the_papers_least_threshold():
  narrow = jnp.full((1 << 10,), 3.0, jnp.bfloat16)
  assert group_norms(narrow, group_by(narrow, [("", "all")])).tolist() == [96.0]
  # ResNet's: a change by -2e-5 of the norm of a million weights.
  x = np.random.default_rng(0).normal(0, 0.05, 1 << 20).astype(np.float32)
  groups = group_by(x, [("", "all")])
  norm = jax.jit(lambda x: group_norms(x, groups)[0])
  for change in (-1e-5, -2e-5):
    y = (x.astype(np.float64) * (1 + change)).astype(np.float32)
    exact = np.linalg.norm(y.astype(np.float64))
    exact = exact / np.linalg.norm(x.astype(np.float64)) - 1
    assert abs(float(norm(y) / norm(x)) - 1 - exact) < 5e-7


def test_merge_inverts_split_and_another_tree_is_refused():
  for rules in (LAYERS, BLOCKS):
    groups = group_by(PARAMS, rules)
    with pytest.raises(ValueError, match="`params` must have the 10 leaves"):
      group_norms({"a": jnp.zeros(2)}, groups)
    doubled = [[2 * x for x in part] for part in groups.split(PARAMS)]
    merged = groups.merge(doubled, PARAMS)
    factors = [1 if g is None else 2 for g in groups.of_leaf]
    for factor, a, b in zip(
      factors, jax.tree.leaves(PARAMS), jax.tree.leaves(merged), strict=True
    ):
      np.testing.assert_array_equal(factor * a, b)


@pytest.mark.parametrize(
  ("rules", "message"),
  [
    ([("nope", "a"), ("", "b")], r"`rules` must match a leaf each, got 'nope'"),
    ([("kernel", "a")], r"`rules` must cover every leaf, got '.*bias.*'"),
    ([("(", "a")], r"`rules` must have regular expressions, got '\('"),
    ([("", None)], r"`rules` must put a leaf in a group"),
  ],
)
def test_bad_rules_are_named(rules, message):
  with pytest.raises(ValueError, match=message):
    group_by(PARAMS, rules)
