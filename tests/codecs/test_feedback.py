import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmotion import codecs, make_key
from jaxmotion.codecs import feedback
from tests.codecs.jitted import decode, encode, init

RNG = np.random.default_rng(0)
XS = RNG.normal(size=(200, 120)).astype(np.float32)
TOPK = codecs.topk(density=0.1, block=20)
INT4 = codecs.uniform(bits=4)
INNER = pytest.mark.parametrize(
  "inner",
  [
    TOPK,
    INT4,
    codecs.cast("bfloat16"),
    codecs.chain(TOPK, codecs.cast("float16")),
  ],
  ids=repr,
)


def run(codec, xs=XS):
  """Errors and what was sent, of every step."""

  def step(state, x):
    payload, state = codec.encode(x, state, make_key(0))
    return state, (codec.error(state), codec.decode(payload, x))

  return jax.jit(lambda xs: jax.lax.scan(step, codec.init(xs[0]), xs))(xs)[1]


@functools.partial(jax.jit, static_argnums=0)
def read_error(codec, state):
  return codec.error(state)


@functools.partial(jax.jit, static_argnums=0)
def settle(codec, state, mean):
  return codec.after_reduce(state, mean)


@INNER
def test_error_and_what_was_sent_make_up_the_value(inner):
  errors, sent = run(feedback(inner), XS[:20])
  errors, sent = np.asarray(errors), np.asarray(sent)
  before = np.concatenate([np.zeros((1, 120), np.float32), errors[:-1]])
  values = XS[:20] + before
  if inner is not INT4:
    # To nearest, v - y is exact (Sterbenz), so that nothing at all is lost.
    np.testing.assert_array_equal(errors, values - sent)
    np.testing.assert_array_equal(errors + sent, values)
  # A compiler may fuse the product that decodes a level into the difference,
  # and so leave out the rounding of the level to float32.
  assert (np.abs(errors + sent - values) <= 2.0**-23 * np.abs(sent)).all()


@INNER
def test_what_travels_is_the_value_plus_the_remembered_error(inner):
  codec = feedback(inner, decay=0.5)
  state = codec.init(XS[0])
  memory = state.memory._replace(count=jnp.int32(1), value=XS[1])
  state = state._replace(memory=memory)
  payload, _ = encode(codec, XS[0], state)
  plain, _ = encode(inner, XS[0] + 0.5 * XS[1])
  jax.tree.map(np.testing.assert_array_equal, payload, plain)


def test_the_global_form_remembers_what_the_mean_did_not_say():
  codec = feedback(INT4, form="global")
  payload, state = encode(codec, XS[0], init(codec, XS[0]))
  np.testing.assert_array_equal(read_error(codec, state), XS[0])
  mean = np.asarray(decode(codec, payload, XS[0])) / 2
  settled = settle(codec, state, mean)
  np.testing.assert_array_equal(read_error(codec, settled), XS[0] - mean)
  local = feedback(INT4)
  _, state = encode(local, XS[0], init(local, XS[0]))
  settled = settle(local, state, mean)
  found = read_error(local, settled)
  np.testing.assert_array_equal(found, read_error(local, state))


@pytest.mark.parametrize("form", ["local", "global"])
def test_what_is_not_finite_is_forgotten(form):
  codec = feedback(codecs.uniform(bits=4, block=20), form=form)
  for bad in (np.nan, np.inf, -np.inf):
    x = XS[0].copy()
    x[3] = bad
    payload, state = encode(codec, x, init(codec, x))
    state = settle(codec, state, decode(codec, payload, x))
    assert np.isfinite(read_error(codec, state)).all()
    payload, state = encode(codec, XS[1], state)
    assert np.isfinite(decode(codec, payload, x)).all()


def test_memory_is_float32_whatever_the_values_are():
  x = XS[0].astype("bfloat16")
  codec = feedback(INT4)
  payload, state = encode(codec, x, init(codec, x))
  error = read_error(codec, state)
  assert error.dtype == state.memory.value.dtype == jnp.float32
  assert decode(codec, payload, x).dtype == x.dtype


@pytest.mark.parametrize(
  "inner",
  [
    codecs.random_k(density=0.1),
    codecs.uniform(bits=1),
    codecs.uniform(bits=2, rounding="stochastic"),
    codecs.ternary(),
    codecs.nonnegative(),
    codecs.chain(codecs.random_k(density=0.1), INT4),
    codecs.chain(TOPK, codecs.ternary()),
    feedback(INT4),
    codecs.rules([("a", INT4), ("b", feedback(INT4))]),
    codecs.buckets(codecs.ternary()),
  ],
  ids=repr,
)
def test_a_memory_that_would_grow_is_refused(inner):
  with pytest.raises(ValueError, match="`codec` must bound the error memory"):
    feedback(inner)


def test_a_codec_states_that_it_bounds_the_memory_and_whether_it_needs_a_key():
  stochastic = codecs.uniform(bits=4, rounding="stochastic")
  assert feedback(stochastic).needs_key and not feedback(INT4).needs_key

  class halves_for_test(codecs.cast):
    @property
    def laws(self):
      return codecs.Laws()

  with pytest.raises(ValueError, match="`codec` must bound the error memory"):
    feedback(halves_for_test("bfloat16"))
  assert feedback(codecs.random_k(density=0.1, scaled=False)).needs_key
