import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmotion import codecs, make_key
from jaxmotion.wire import payload_bytes

TREE = {
  "dense": {"bias": jnp.ones(5), "kernel": jnp.ones((40, 30))},
  "scale": jnp.ones((), jnp.bfloat16),
  "empty": jnp.zeros((0, 3)),
}
INT4 = codecs.uniform(bits=4, rounding="stochastic", block=64)
TOPK = codecs.topk(density=0.1)
RULES = codecs.rules(
  [("bias|scale", codecs.cast("bfloat16")), (".*", codecs.feedback(INT4))]
)


def test_bytes_are_those_of_the_real_buffers():
  truncated = codecs.buckets(codecs.truncate(bytes=3))
  for codec in (
    RULES,
    codecs.buckets(RULES),
    codecs.buckets(codecs.sign(), max_leaf_size=10),
    codecs.feedback(codecs.buckets(TOPK)),
    codecs.rules([("k", codecs.chain(TOPK, INT4)), ("", truncated)]),
  ):
    encode = lambda key, codec=codec: codec.encode(TREE, codec.init(TREE), key)
    # Which is the size of what is computed: tests of the codecs run it.
    payload, _ = jax.eval_shape(encode, make_key(0))
    real = sum(a.size * a.dtype.itemsize for a in jax.tree.leaves(payload))
    assert payload_bytes(codec, TREE) == real > 0


def test_a_codec_of_arrays_encodes_each_leaf():
  said = payload_bytes(INT4, TREE)
  assert said == sum(payload_bytes(INT4, a) for a in jax.tree.leaves(TREE))
  for codec, width in ((codecs.identity(), 2), (codecs.truncate(bytes=3), 3)):
    assert payload_bytes(codec, jnp.ones(10, jnp.bfloat16)) == 10 * width
  assert payload_bytes(codecs.identity(), {}) == 0


def test_shapes_weigh_what_arrays_do_and_nothing_is_made():
  # 2^40 values would not fit: only shapes are traced.
  huge = jax.ShapeDtypeStruct((1 << 10, 1 << 20), jnp.float32)
  assert payload_bytes(codecs.identity(), huge) == 4 << 30
  shapes = jax.eval_shape(lambda: TREE)
  assert payload_bytes(RULES, shapes) == payload_bytes(RULES, TREE)


@pytest.mark.parametrize("codec", [codecs.identity(), RULES])
def test_a_leaf_that_is_not_floating_point_is_named(codec):
  tree = {"dense": {"bias": jnp.ones(3), "n": np.arange(3, dtype=np.int32)}}
  with pytest.raises(TypeError, match=r"`like/dense/n` must be .*got int32\[3"):
    payload_bytes(codec, tree)
