"""Presets of local updates, against the reference in NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh

from jaxmotion import codecs, presets, transforms, wire
from tests.transforms import local_reference as reference
from tests.transforms.test_local_updates import (
  INNER,
  MESH,
  ROWS,
  WORKERS,
  assert_trees_close,
  loss_fn,
  run,
)

BUILDERS = {
  "diloco": presets.diloco,
  "streaming_diloco": presets.streaming_diloco,
  "muloco": presets.muloco,
}


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
  scheme = BUILDERS[name](INNER, **options)
  state = run(*transforms.make_train_step(loss_fn, scheme, MESH), steps)
  options = {k: v for k, v in options.items() if k != "codec"}
  anchor, _ = reference.train(
    reference.make_params(),
    [reference.make_batch(i, ROWS) for i in range(steps)],
    workers=WORKERS,
    **options,
    **own,
  )
  assert_trees_close(state.params, anchor)


def test_the_default_schedules_are_the_papers():
  """Reads which steps send, on the count alone, from the compiled program."""
  mesh = Mesh(np.array(jax.devices()[:2]), ("data",))
  params = {name: jnp.zeros((64, 64)) for name in "abcd"}

  def quadratic(params, batch):
    return sum(jnp.sum((a - batch[0]) ** 2) for a in jax.tree.leaves(params))

  init, step = transforms.make_train_step(
    quadratic, presets.streaming_diloco(optax.sgd(0.0)), mesh
  )
  state = init(params)
  batch = jnp.ones((2, 64, 64))
  compiled = step.lower(state, batch).compile()
  quiet, due = (
    wire.compiled_bytes(compiled, branch=k).total_bytes for k in (0, 1)
  )
  # Four bits of 4096 elements, scales of blocks, the loss and the agreement.
  assert quiet == 4 and 4 * 2048 < due - 4 < 4 * 2300


def round_to_e3m0(x, block=32):
  """Rounds to 0 and 2^-6 M to M in value; M is the nearest to max|x|."""
  rows = np.abs(x.reshape(-1, block))
  peak = rows.max(-1, keepdims=True)
  low = 2.0 ** np.floor(np.log2(peak))
  greatest = np.where(peak >= 1.5 * low, 2 * low, low)
  levels = np.stack([0 * greatest, *(greatest / 2**k for k in range(7))])
  nearest = np.abs(levels - rows).argmin(0)[None]
  taken = np.take_along_axis(levels, nearest, 0)[0]
  return np.sign(x) * taken.reshape(x.shape)


def test_the_papers_format_is_gathered_and_added_at_full_precision():
  rng = np.random.default_rng(0)
  mesh = Mesh(np.array(jax.devices()[:8]), ("data",))
  targets = rng.normal(size=(8, 16, 8)).astype(np.float32)
  e3m0 = codecs.microscaling(format="float4_e3m0")
  outer = optax.chain(
    transforms.exchange("data", e3m0, method="gather"), optax.sgd(1.0)
  )
  init, step = transforms.make_train_step(
    lambda w, target: jnp.sum((w[None] - target) ** 2) / 2,
    transforms.local_updates(optax.sgd(1.0), outer, every=1),
    mesh,
  )
  state, _ = step(init(jnp.zeros((16, 8))), targets)
  expected = -np.mean([round_to_e3m0(-target) for target in targets], 0)
  np.testing.assert_allclose(state.params, expected, rtol=1e-6, atol=1e-7)


def test_muon_learns_in_two_bits():
  rng = np.random.default_rng(0)
  target = rng.normal(size=(16, 8)).astype(np.float32) / 4

  def distance(params, batch):
    return jnp.mean((batch["x"] @ params["w"] - batch["y"]) ** 2)

  # Without outer momentum, which overshoots in so few rounds.
  init, step = transforms.make_train_step(
    distance,
    presets.muloco(
      optax.cosine_decay_schedule(0.05, 60),
      every=4,
      outer_rate=1.0,
      outer_momentum=0.0,
    ),
    MESH,
  )
  state = init({"w": jnp.zeros((16, 8))})
  for _ in range(60):
    x = rng.normal(size=(8 * WORKERS, 16)).astype(np.float32)
    state, _ = step(state, {"x": x, "y": x @ target})
  error = np.linalg.norm(np.asarray(state.params["w"]) - target)
  assert error < 0.2 * np.linalg.norm(target)
  batch = {"x": x, "y": x @ target}
  compiled = step.lower(state, batch).compile()
  due, quiet = (
    wire.compiled_bytes(compiled, branch=k).total_bytes for k in (1, 0)
  )
  assert quiet == 6 and due < 4 * 16 * 8 / 4


@pytest.mark.parametrize(
  ("name", "options", "error", "match"),
  [
    ("diloco", {"outer_rate": 0.0}, ValueError, "`outer_rate` must be"),
    ("diloco", {"outer_momentum": 1.0}, ValueError, "`outer_momentum` must"),
    ("diloco", {"outer": INNER}, TypeError, "`outer` must not be given to `di"),
    ("streaming_diloco", {"delay": 100}, ValueError, "`delay` must be less"),
    ("streaming_diloco", {"fragments": 3}, ValueError, "`fragments` must div"),
  ],
)
def test_wrong_arguments_are_refused(name, options, error, match):
  with pytest.raises(error, match=match):
    BUILDERS[name](INNER, **options)
