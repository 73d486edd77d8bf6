import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmotion import codecs, make_key

RNG = np.random.default_rng(0)
TOPK = codecs.topk(density=0.25, block=8)
CASES = {
  "topk": TOPK,
  "threshold": codecs.threshold(value=1.0, capacity=0.9),
  "random_k": codecs.random_k(density=0.4, scaled=False),
  "topk_int8": codecs.chain(TOPK, codecs.uniform(bits=8)),
  "tiles": codecs.chain(codecs.tiles(chunk=4), codecs.topk_columns(count=9)),
}


@pytest.mark.parametrize("name", CASES)
def test_an_element_is_averaged_over_those_who_sent_it(name):
  inner = CASES[name]
  codec = codecs.contributors(inner)
  xs = RNG.normal(size=(3, 5, 16)).astype(np.float32)

  @jax.jit
  def run(xs):
    keys = jax.vmap(lambda r: make_key(0, r))(jnp.arange(3))
    payloads = jax.vmap(lambda x, k: codec.encode(x, (), k)[0])(xs, keys)
    sent = jax.vmap(lambda p: inner.decode(p, xs[0]))(payloads)
    return sent, codec.sum_decoded(payloads, xs[0]) / 3

  sent, mean = map(np.asarray, run(xs))
  count = (sent != 0).sum(0)
  expected = np.where(count > 0, sent.sum(0) / np.maximum(count, 1), 0)
  # An element may be sent and still round to zero.
  settled = np.abs(sent).min(0, where=sent != 0, initial=9) > 0.05
  np.testing.assert_allclose(mean[settled], expected[settled], rtol=1e-5)
  assert (mean[count == 0] == 0).all()


def test_a_chain_with_a_rotation_averages_in_the_domain_of_the_selection():
  inner = codecs.contributors(TOPK)
  rotate = codecs.rotate(block=32)
  codec = codecs.feedback(codecs.chain(rotate, inner))
  xs = RNG.normal(size=(2, 64)).astype(np.float32)

  @jax.jit
  def run(xs):
    payloads = jax.vmap(lambda x: codec.encode(x, codec.init(x))[0])(xs)
    values = jax.vmap(lambda x: rotate.encode(x)[0])(xs).values
    rotated = inner.sum_decoded(payloads.values, values[0])
    payload = rotate.encode(xs[0])[0]._replace(values=rotated)
    both = rotate.decode(payload, xs[0])
    return codec.sum_decoded(payloads, xs[0]), both

  np.testing.assert_allclose(*run(xs), atol=1e-5)


def test_what_selects_nothing_is_refused():
  for codec in (codecs.identity(), codecs.rotate(), codecs.sign()):
    with pytest.raises(ValueError, match="`codec` must select"):
      codecs.contributors(codec)
