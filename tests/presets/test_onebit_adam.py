"""The preset computes what 1-bit Adam does.

`onebit.npz` holds outputs of DeepSpeed's `compressed_allreduce` on four
workers, of 50 elements: the `mean`, each worker's `own` error and the error
`of_mean` of the row that it reduces.
"""

import jax
import numpy as np
import optax
import pytest

import jaxmotion
from jaxmotion import codecs, presets
from tests.paths import ROOT
from tests.presets.reference import PARAMS, gradients, make_run, pick

GOLDEN = np.load(ROOT / "tests" / "presets" / "onebit.npz")


def test_means_and_memories_are_those_of_the_reference():
  params = {"x": np.zeros(50, np.float32)}
  state, update = make_run(jaxmotion.exchange("data", codecs.onebit()), params)
  for step in range(6):
    rngs = [np.random.default_rng(77 * step + r) for r in range(4)]
    each = np.stack([g.normal(size=50).astype(np.float32) for g in rngs])
    mean, state = update({"x": each}, state)
    np.testing.assert_allclose(mean["x"], GOLDEN["mean"][step], atol=5e-6)
    (reduced,) = state.codec_state.value
    for r in range(4):
      for name in ("own", "of_mean"):
        np.testing.assert_allclose(
          getattr(reduced.first, name)[r],
          GOLDEN[f"{name}{r}"][step],
          atol=5e-6,
        )


def test_before_it_freezes_it_is_adam():
  tx = presets.onebit_adam("data", 0.1, freeze=9, weight_decay=0.1)
  ones = jax.tree.map(np.ones_like, pick(PARAMS))
  state, update = make_run(tx, ones)
  plain = optax.adamw(0.1, weight_decay=0.1)
  expected_state = plain.init(ones)
  for step in range(3):
    updates, state = update(pick(gradients(step)), state)
    mean = jax.tree.map(lambda a: a.mean(0), pick(gradients(step)))
    expected, expected_state = plain.update(mean, expected_state, ones)
    for name, found in updates.items():
      np.testing.assert_allclose(found, expected[name], atol=5e-6)


@pytest.mark.parametrize("as_coded", [False, True])
def test_then_momenta_are_exchanged_and_squares_stay(as_coded):
  """With a codec that loses nothing, against the definition in numpy."""
  tx = presets.onebit_adam(
    "data", 0.1, freeze=2, codec=codecs.identity(), as_coded=as_coded
  )
  state, update = make_run(tx, pick(PARAMS))
  mu = nu = np.zeros((12, 20))
  for step in range(4):
    grads = pick(gradients(step))
    grads["a"][:, 0] = 0.0 if step < 2 else 1e-3
    updates, state = update(grads, state)
    mean = grads["a"].mean(0)
    mu = 0.9 * mu + 0.1 * mean
    nu = 0.999 * nu + 0.001 * mean**2 if step < 2 else nu
    if as_coded:
      expected = mu / (np.sqrt(nu) + 1e-8)
    else:
      end = 1 - 0.9 ** (step + 1), 1 - 0.999 ** min(step + 1, 2)
      root = np.sqrt(nu / end[1]) + 1e-8
      expected = np.where(nu > 0, mu / end[0] / root, 0)
      # The most that Adam ever moves an element, which signs are held to.
      most = 0.1 / np.sqrt(0.001)
      assert step < 2 or np.abs(expected).max() > most
      expected = np.clip(expected, -most, most)
    np.testing.assert_allclose(
      updates["a"], -0.1 * expected, rtol=1e-4, atol=5e-6
    )
