"""The preset computes what the reference does, with what keeps it stable.

`dgc.npz` holds means of synxlin/deep-gradient-compression on four workers, of a
matrix of 12 x 20, at a ratio of 0.05, sampled whole, and a momentum of 0.9.
"""

import math

import jax
import numpy as np
import optax
import pytest

from jaxmotion import presets
from tests.paths import ROOT
from tests.presets.reference import flatten, gradients, make_run

GOLDEN = np.load(ROOT / "tests" / "presets" / "dgc.npz")


@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("masking", [False, True])
def test_means_are_those_of_the_reference(nesterov, masking):
  tx = presets.dgc(
    "data",
    density=0.05,
    nesterov=nesterov,
    masking=masking,
    clip_norm=None,
    warmup=0,
    as_coded=True,
  )
  golden = GOLDEN[f"mean_nesterov{nesterov:d}_masking{masking:d}"]
  params = {k: np.zeros(gradients(0)[k].shape[1:], np.float32) for k in "ab"}
  state, update = make_run(tx, params)
  trace = optax.trace(0.9, nesterov=False)
  dense = trace.init(params["b"])
  for step in range(6):
    grads = {k: gradients(step)[k] for k in "ab"}
    mean, state = update(grads, state)
    np.testing.assert_allclose(mean["a"], golden[step], atol=5e-6)
    if not nesterov:
      # A vector has the momentum of its mean.
      expected, dense = trace.update(grads["b"].mean(0), dense)
      np.testing.assert_allclose(mean["b"], expected, atol=5e-6)


def test_more_is_sent_at_first_and_gradients_are_clipped():
  tx = presets.dgc("data", density=0.01, warmup=4, stages=2, min_size=0)
  state, update = make_run(tx)
  sent = []
  for step in range(6):
    mean, state = update(gradients(0), state)
    # A worker's gradient has at most norm 1 / sqrt(4), grown by momentum.
    assert np.linalg.norm(flatten(mean)) <= 0.501 * (step + 1)
    sent.append(np.count_nonzero(mean["a"]))
  assert sent[0] > 1.5 * sent[2] > 2 * sent[4]


def test_what_is_not_sent_is_sent_later_with_its_momentum():
  """Without masking and at momentum 0, all that comes in goes out."""
  tx = presets.dgc(
    "data",
    density=0.25,
    momentum=0.0,
    masking=False,
    clip_norm=None,
    warmup=0,
    min_size=0,
  )
  state, update = make_run(tx)
  sent = jax.tree.map(np.zeros_like, {k: a[0] for k, a in gradients(0).items()})
  zeros = jax.tree.map(np.zeros_like, gradients(0))
  for step in range(12):
    mean, state = update(zeros if step else gradients(0), state)
    sent = jax.tree.map(np.add, sent, mean)
  exact = jax.tree.map(lambda a: a.mean(0), gradients(0))
  np.testing.assert_allclose(flatten(sent), flatten(exact), atol=1e-6)


def test_a_matrix_in_two_phases_has_its_momentum_once():
  """The workers that average rows encode means of momenta as they are."""
  tx = presets.dgc(
    "data",
    density=1.0,
    masking=False,
    clip_norm=None,
    warmup=0,
    min_size=0,
  )
  rng = np.random.default_rng(0)
  grads = {"w": rng.normal(size=(4, 32, 40)).astype(np.float32)}
  state, update = make_run(tx, {"w": grads["w"][0]})
  trace = optax.trace(0.9)
  plain = trace.init(grads["w"][0])
  for _ in range(3):
    mean, state = update(grads, state)
    expected, plain = trace.update(grads["w"].mean(0), plain)
    np.testing.assert_allclose(mean["w"], expected, atol=1e-5)


def test_a_large_array_and_its_warm_up_are_those_of_the_definition():
  """In numpy: gathered by all, and stages that end where they should."""
  tx = presets.dgc(
    "data", density=0.01, warmup=3, stages=2, clip_norm=None, as_coded=True
  )
  rng = np.random.default_rng(0)
  each = rng.normal(size=(4, 4, 32, 40)).astype(np.float32)
  state, update = make_run(tx, {"w": each[0, 0]})
  momentum = velocity = np.zeros((4, 1280))
  for step, share in enumerate([1 / 3, 2 / 3, 2 / 3, 1]):
    momentum = 0.9 * momentum + each[step].reshape(4, -1)
    velocity = velocity + momentum
    count = math.ceil(0.01**share * 1280)
    least = np.sort(np.abs(velocity), axis=1)[:, -count][:, None]
    is_sent = np.abs(velocity) >= least
    mean, state = update({"w": each[step]}, state)
    expected = np.where(is_sent, velocity, 0).mean(0)
    np.testing.assert_allclose(mean["w"].ravel(), expected, atol=5e-6)
    momentum = np.where(is_sent, 0, momentum)
    velocity = np.where(is_sent, 0, velocity)
