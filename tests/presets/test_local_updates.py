"""Presets of local updates, against the reference in NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxmotion import presets, transforms
from tests.transforms import local_reference as reference
from tests.transforms.helpers import assert_close
from tests.transforms.test_local_updates import (
  INNER,
  MESH,
  ROWS,
  WORKERS,
  loss_fn,
  run,
)


@pytest.mark.parametrize(
  ("name", "options", "own"),
  [
    ("diloco", {"every": 4}, {"outer_rate": 0.7}),
    (
      "streaming_diloco",
      {"every": 6, "fragments": 3, "codec": None},
      {"outer_rate": 0.4, "delay": 1, "mix": 0.5},
    ),
  ],
)
def test_at_full_precision_it_is_the_reference(name, options, own):
  steps = 13
  scheme = getattr(presets, name)(INNER, **options)
  state = run(*transforms.make_train_step(loss_fn, scheme, MESH), steps)
  options = {k: v for k, v in options.items() if k != "codec"}
  anchor, _ = reference.train(
    reference.make_params(),
    [reference.make_batch(i, ROWS) for i in range(steps)],
    workers=WORKERS,
    **options,
    **own,
  )
  assert_close(state.params, anchor, rtol=0)


def test_an_exact_round_of_muloco_is_a_step_of_muon():
  """Workers with one batch, at an outer rate of 1 without momentum."""
  rng = np.random.default_rng(0)
  params = {"w": np.float32(rng.normal(size=(16, 8))), "b": np.ones(8, "f")}
  x = np.float32(rng.normal(size=(2, 16)))

  def mean_square(params, x):
    return jnp.mean((x @ params["w"] + params["b"][None]) ** 2)

  scheme = presets.muloco(
    0.05, weight_decay=0.1, every=1, outer_rate=1, outer_momentum=0, codec=None
  )
  init, step = transforms.make_train_step(mean_square, scheme, MESH)
  state, _ = step(init(params), np.tile(x, (WORKERS, 1)))
  muon = optax.contrib.muon(0.05, weight_decay=0.1, adam_weight_decay=0.1)
  grads = jax.grad(mean_square)(params, x)
  updates, _ = jax.jit(muon.update)(grads, muon.init(params), params)
  assert_close(state.params, optax.apply_updates(params, updates), rtol=0)


@pytest.mark.parametrize(
  ("name", "options", "error", "match"),
  [
    ("diloco", {"outer_momentum": 1.0}, ValueError, "`outer_momentum` must"),
    ("diloco", {"outer": INNER}, TypeError, "`outer` must not be given to `di"),
    ("zeropp", {"regather": True}, TypeError, "`regather` must not be given"),
  ],
)
def test_wrong_arguments_are_refused(name, options, error, match):
  with pytest.raises(error, match=match):
    getattr(presets, name)(INNER, **options)
