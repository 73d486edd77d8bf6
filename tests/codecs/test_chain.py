import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmotion import codecs, make_key
from tests.codecs.jitted import decode, encode, trip

X = jnp.asarray(np.random.default_rng(0).normal(size=(8, 24)), jnp.float32)
TOPK = codecs.topk(density=0.25, block=8)
INT8 = codecs.uniform(bits=8)
STOCHASTIC = codecs.uniform(bits=4, rounding="stochastic")


def test_three_codecs_nest_in_order_and_may_end_in_a_chain():
  half = codecs.cast("bfloat16")
  payload, y = trip(codecs.chain(codecs.identity(), TOPK, half), X)
  words = payload.values.values.words
  assert words.dtype == jnp.uint16 and words.shape == (48,)
  sparse, kept = trip(TOPK, X)
  np.testing.assert_array_equal(payload.values.indices, sparse.indices)
  # What is kept, rounded to bfloat16.
  np.testing.assert_array_equal(y, kept.astype(jnp.bfloat16).astype("float32"))
  nested = codecs.chain(codecs.identity(), codecs.chain(TOPK, half))
  jax.tree.map(np.testing.assert_array_equal, (payload, y), trip(nested, X))


def test_the_values_go_through_the_next_codec_as_by_itself():
  codec = codecs.chain(TOPK, codecs.uniform(bits=4))
  payload, y = trip(codec, X)
  sparse, _ = encode(TOPK, X)
  inner, _ = encode(codecs.uniform(bits=4), sparse.values)
  jax.tree.map(np.testing.assert_array_equal, payload.values, inner)
  values = decode(codecs.uniform(bits=4), inner, sparse.values)
  found = decode(TOPK, sparse._replace(values=values), X)
  np.testing.assert_array_equal(y, found)


def test_a_key_is_needed_if_any_codec_needs_one():
  assert not codecs.chain(TOPK, codecs.identity()).needs_key
  codec = codecs.chain(TOPK, STOCHASTIC)
  assert codec.needs_key
  with pytest.raises(ValueError, match="`key` must be a jaxmotion.Key for ch"):
    codec.encode(X)
  a, b = (trip(codec, X, make_key(0, w))[1] for w in (0, 1))
  assert (a != b).any()


def test_two_random_codecs_do_not_share_their_randomness():
  twice = codecs.chain(codecs.identity(), STOCHASTIC)
  alone = encode(STOCHASTIC, X, (), make_key(0))[0]
  chained = trip(twice, X, make_key(0))[0].values
  assert (alone.words != chained.words).any()


@pytest.mark.parametrize(
  "first",
  [
    codecs.sign(),
    codecs.uniform(bits=8),
    codecs.chain(TOPK, codecs.identity()),
  ],
)
def test_a_payload_without_values_is_named(first):
  codec = codecs.chain(first, codecs.cast("bfloat16"))
  for method in (codec.init, codec.encode):
    with pytest.raises(TypeError, match="`codecs` .* a field `values`") as e:
      jax.eval_shape(method, X)
    assert repr(first) in str(e.value)


@pytest.mark.parametrize(
  ("given", "message"),
  [
    *(
      (pair, "must be codecs of arrays")
      for bad in (codecs.rules([(".*", TOPK)]), codecs.buckets(TOPK), None)
      for pair in ((bad, TOPK), (TOPK, bad))
    ),
    ((codecs.feedback(codecs.buckets(TOPK)), TOPK), "must be codecs of arrays"),
    # Error memory goes around a chain.
    ((codecs.identity(), codecs.feedback(INT8)), "must hold no feedback"),
    ((), "must be two codecs or more"),
    ((TOPK,), "must be two codecs or more"),
  ],
  ids=repr,
)
def test_what_makes_no_chain_is_refused(given, message):
  with pytest.raises((TypeError, ValueError), match=f"`codecs` {message}"):
    codecs.chain(*given)


def test_a_rotation_is_inverted_once_for_the_sum_of_all_workers(monkeypatch):
  codec = codecs.chain(codecs.rotate(block=64), INT8)
  x = np.random.default_rng(0).normal(size=(4, 6, 50)).astype(np.float32)
  calls, decode_rotated = [], codecs.rotate.decode
  monkeypatch.setattr(
    codecs.rotate, "decode", lambda *a: calls.append(a) or decode_rotated(*a)
  )

  @jax.jit
  def run(x):
    payloads = jax.vmap(lambda a: codec.encode(a)[0])(x)
    total = codec.sum_decoded(payloads, x[0])
    assert len(calls) == 1
    return total, jax.vmap(lambda a: codec.decode(a, x[0]))(payloads).sum(0)

  np.testing.assert_allclose(*run(x), atol=1e-5)
