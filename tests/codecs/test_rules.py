import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxmotion import codecs, make_key
from jaxmotion.codecs.extend import partition
from tests.codecs.jitted import decode, encode

TREE = {
  "dense": {"bias": jnp.arange(3.0), "kernel": jnp.arange(12.0).reshape(3, 4)},
  "norm": {"scale": jnp.ones(5)},
}
INT8, BF16, PLAIN = (
  codecs.uniform(bits=8),
  codecs.cast("bfloat16"),
  codecs.identity(),
)


def chosen(codec, tree=TREE):
  """The codec of every leaf."""
  cut = partition(codec, tree)
  return {cut.leaves[i][0]: p.codec for p in cut.leaf_groups for i in p.leaves}


def test_the_first_rule_whose_pattern_is_found_wins():
  codec = codecs.rules([("bias", PLAIN), ("dense", BF16), (".*", INT8)])
  assert chosen(codec) == {
    "dense/bias": PLAIN,
    "dense/kernel": BF16,
    "norm/scale": INT8,
  }
  turned = codecs.rules([("dense", BF16), ("bias|kernel", PLAIN), ("", INT8)])
  assert chosen(turned)["dense/bias"] == BF16
  # Patterns are searched for, and may be anchored.
  codec = codecs.rules([("^norm/", PLAIN), ("e$", BF16), ("k.*l|b", INT8)])
  assert chosen(codec) == {
    "dense/bias": INT8,
    "dense/kernel": INT8,
    "norm/scale": PLAIN,
  }


def test_a_tree_comes_back_in_its_structure():
  codec = codecs.rules([("kernel", codecs.truncate(bytes=4)), (".*", PLAIN)])
  payload, state = encode(codec, TREE)
  assert len(payload) == len(state) == 3
  back = decode(codec, payload, TREE)
  assert jax.tree.structure(back) == jax.tree.structure(TREE)
  jax.tree.map(np.testing.assert_array_equal, back, TREE)


def test_a_tree_codec_may_be_nested():
  inner = codecs.rules([("bias", PLAIN), ("kernel", BF16)])
  codec = codecs.rules([("dense", inner), ("norm", codecs.buckets(INT8))])
  assert chosen(codec) == {
    "dense/bias": PLAIN,
    "dense/kernel": BF16,
    "norm/scale": INT8,
  }
  payload, _ = encode(codec, TREE)
  back = decode(codec, payload, TREE)
  np.testing.assert_array_equal(back["dense"]["bias"], TREE["dense"]["bias"])
  np.testing.assert_allclose(back["norm"]["scale"], 1.0, rtol=2**-15)
  # Buckets inside a rule join its own leaves alone.
  codec = codecs.rules([("dense", codecs.buckets(INT8)), (".*", INT8)])
  cut = partition(codec, TREE)
  names = [[cut.leaves[i][0] for i in part.leaves] for part in cut.leaf_groups]
  assert names == [["dense/bias", "dense/kernel"], ["norm/scale"]]


def test_every_leaf_has_its_own_randomness():
  tree = {"a": jnp.linspace(-1, 1, 99), "b": jnp.linspace(-1, 1, 99)}
  codec = codecs.rules([(".*", codecs.uniform(bits=2, rounding="stochastic"))])
  payload, _ = encode(codec, tree, (), make_key(0))
  assert (payload[0].words != payload[1].words).any()
  swapped, _ = encode(codec, {"b": tree["b"]}, (), make_key(0))
  np.testing.assert_array_equal(swapped[0].words, payload[1].words)


def test_patterns_without_a_leaf_and_leaves_without_a_pattern_are_named():
  # One matches, although the rule before it took the leaf.
  codec = codecs.rules([("dense|norm", PLAIN), ("bias", BF16)])
  assert set(chosen(codec).values()) == {PLAIN}
  codec = codecs.rules([("dense|norm", PLAIN), ("embed", BF16)])
  with pytest.raises(ValueError, match="`rules` must match a leaf each") as e:
    codec.init(TREE)
  assert "'embed'" in str(e.value) and "'dense/kernel'" in str(e.value)
  codec = codecs.rules([("kernel", PLAIN), ("bias", BF16)])
  with pytest.raises(ValueError, match="`rules` must cover every leaf") as e:
    codec.encode(TREE)
  for part in ("'norm/scale'", "'kernel', 'bias'", r"('.*', codec)"):
    assert part in str(e.value)


def test_a_part_of_a_tree_or_inner_rules_need_not_use_all_patterns():
  codec = codecs.buckets(codecs.rules([("^a", PLAIN), (".*", BF16)]))
  leaf, mask = jax.ShapeDtypeStruct((8,), "float32"), optax.MaskedNode()
  (group,) = partition(codec, {"a": mask, "b": leaf}).leaf_groups
  assert group.codec == BF16
  with pytest.raises(ValueError, match="`rules` must match a leaf each"):
    partition(codec, {"b": leaf})
  inner = codecs.rules([("dense", PLAIN), (".*", BF16)])
  codec = codecs.rules([("^a", inner), (".*", BF16)])
  leaf = jax.ShapeDtypeStruct((8,), "float32")
  partition(codec, {"a": {"dense": leaf}, "b": {"dense": leaf}})
  with pytest.raises(ValueError, match="got 'dense', .* none of 'a/norm'"):
    partition(codec, {"a": {"norm": leaf}, "b": {"dense": leaf}})


@pytest.mark.parametrize(
  ("rules", "message"),
  [
    ([], "`rules` must hold at least one"),
    ([("(a", PLAIN)], r"`rules` must have regular .*'\(a'"),
    *(
      ([pair], "`rules` must be pairs of a pattern")
      for pair in (("a",), ("a", "b"), (None, PLAIN), ("a", PLAIN, BF16))
    ),
  ],
)
def test_bad_rules_are_named(rules, message):
  with pytest.raises((TypeError, ValueError), match=message):
    codecs.rules(rules)


def test_integers_are_named():
  tree = {"w": jnp.ones(3), "steps": {"n": jnp.arange(3)}}
  with pytest.raises(TypeError, match=r"`steps/n` must be .* int32\[3\]"):
    codecs.rules([(".*", PLAIN)]).encode(tree)
  with pytest.raises(TypeError, match=r"`x` must be .* got int32\[3\]"):
    BF16.encode(jnp.arange(3))
