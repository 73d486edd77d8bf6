import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmotion import codecs
from jaxmotion.codecs.extend import partition
from tests.codecs.jitted import decode, encode, init

RNG = np.random.default_rng(0)
TREE = {
  "a": jnp.asarray(RNG.normal(size=(3, 4)), jnp.float32),
  "b": jnp.asarray(RNG.normal(size=7), jnp.bfloat16),
  "c": jnp.asarray(RNG.normal(size=(40, 5)), jnp.float32),
  "d": jnp.float32(2.5),
  "e": jnp.asarray(RNG.normal(size=9), jnp.bfloat16),
  "f": jnp.zeros((0, 3)),
}
PLAIN, INT8 = codecs.identity(), codecs.uniform(bits=8)


def groups(codec, tree=TREE):
  cut = partition(codec, tree)
  return [
    "".join(cut.leaves[i][0] for i in part.leaves) for part in cut.leaf_groups
  ]


def test_small_leaves_of_one_dtype_and_codec_are_joined_and_large_ones_not():
  assert groups(codecs.buckets(PLAIN, max_leaf_size=100)) == ["c", "adf", "be"]
  joined = groups(codecs.buckets(PLAIN, max_leaf_size=200))
  assert sorted(joined) == ["acdf", "be"]
  assert "a" in groups(codecs.buckets(PLAIN, max_leaf_size=11))
  codec = codecs.rules([("a|b", INT8), (".*", PLAIN)])
  joined = groups(codecs.buckets(codec, max_leaf_size=100))
  assert sorted(joined) == ["a", "b", "c", "df", "e"]


@pytest.mark.parametrize("most", [1, 12, 13, 20, 1000])
def test_no_bucket_holds_more_than_asked(most):
  tree = {f"{i:02d}": jnp.zeros(n) for i, n in enumerate([5, 7, 1, 12, 3, 9])}
  cut = partition(codecs.buckets(PLAIN, max_bucket_size=most), tree)
  for part, like in zip(cut.leaf_groups, cut.array_likes(), strict=True):
    assert like.shape[0] <= most or len(part.leaves) == 1
  held = [i for part in cut.leaf_groups for i in part.leaves]
  assert sorted(held) == list(range(6))
  if most == 1000:
    assert len(cut.leaf_groups) == 1


@pytest.mark.parametrize("most", [10, 1 << 20])
def test_a_tree_comes_back_with_its_shapes_and_dtypes(most):
  codec = codecs.buckets(PLAIN, max_leaf_size=100, max_bucket_size=most)
  payload, _ = encode(codec, TREE)
  back = decode(codec, payload, TREE)
  for a, b in zip(jax.tree.leaves(back), jax.tree.leaves(TREE), strict=True):
    assert a.shape == b.shape and a.dtype == b.dtype
    np.testing.assert_array_equal(a, b)


def test_a_bucket_is_encoded_as_one_array():
  codec = codecs.buckets(INT8, max_leaf_size=100)
  payload, _ = encode(codec, {k: TREE[k] for k in "ad"})
  flat = np.append(np.asarray(TREE["a"]), TREE["d"])
  alone, _ = encode(INT8, flat)
  assert len(payload) == 1
  np.testing.assert_array_equal(payload[0].words, alone.words)
  np.testing.assert_array_equal(payload[0].scale, alone.scale)


@pytest.mark.parametrize("outside", [True, False])
def test_error_memory_is_that_of_the_buckets(outside):
  int2 = codecs.uniform(bits=2)
  codec = (
    codecs.feedback(codecs.buckets(int2, max_leaf_size=100))
    if outside
    else codecs.buckets(codecs.feedback(int2), max_leaf_size=100)
  )
  assert codec.is_tree
  state = init(codec, TREE)
  assert [s.memory.value.shape for s in state] == [(40, 5), (13,), (16,)]
  assert all(s.memory.value.dtype == jnp.float32 for s in state)
  payload, new = encode(codec, TREE, state)
  back = decode(codec, payload, TREE)
  error = jax.jit(codecs.feedback(int2).error)(new[0])
  expected = np.asarray(TREE["c"]) - np.asarray(back["c"])
  np.testing.assert_array_equal(error, expected)
  assert jax.tree.structure(new) == jax.tree.structure(state)
