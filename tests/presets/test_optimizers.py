import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxmotion
from jaxmotion import codecs, presets
from jaxmotion.codecs.extend import partition
from jaxmotion.transforms.extend import find_exchanges, trace_state
from tests.paths import ROOT
from tests.presets.reference import (
  MESH,
  PARAMS,
  flatten,
  gradients,
  make_run,
  pick,
)

ONEBIT, SPARSE_LOCO = (
  np.load(ROOT / "tests" / "presets" / f"{name}.npz")
  for name in ("onebit", "sparse_loco")
)
# A side of tiles that divides those of the matrix, which then needs no zeros.
DECAY, COUNT, CHUNK = 0.9, 3, 4


def test_onebit_means_and_memories_are_those_of_the_reference():
  params = {"x": np.zeros(50, np.float32)}
  state, update = make_run(jaxmotion.exchange("data", codecs.onebit()), params)
  for step in range(6):
    rngs = [np.random.default_rng(77 * step + r) for r in range(4)]
    each = np.stack([g.normal(size=50).astype(np.float32) for g in rngs])
    mean, state = update({"x": each}, state)
    np.testing.assert_allclose(mean["x"], ONEBIT["mean"][step], atol=5e-6)
    (reduced,) = state.codec_state.value
    for r in range(4):
      for name in ("own", "of_mean"):
        np.testing.assert_allclose(
          getattr(reduced.first, name)[r], ONEBIT[f"{name}{r}"][step], atol=5e-6
        )


def test_it_is_adam_until_squares_stay_and_momenta_are_exchanged():
  """With a codec that loses nothing, against the definition in numpy."""
  tx = presets.onebit_adam(
    "data", 0.1, freeze=2, codec=codecs.identity(), weight_decay=0.1
  )
  ones = jax.tree.map(np.ones_like, pick(PARAMS))
  state, update = make_run(tx, ones)
  mu = nu = np.zeros((12, 20))
  for step in range(4):
    grads = pick(gradients(step))
    grads["a"][:, 0] = 0.0 if step < 2 else 1e-3
    updates, state = update(grads, state)
    mean = grads["a"].mean(0)
    mu = 0.9 * mu + 0.1 * mean
    nu = 0.999 * nu + 0.001 * mean**2 if step < 2 else nu
    end = 1 - 0.9 ** (step + 1), 1 - 0.999 ** min(step + 1, 2)
    root = np.sqrt(nu / end[1]) + 1e-8
    expected = np.where(nu > 0, mu / end[0] / root, 0)
    # The most that Adam ever moves an element, which signs are held to.
    most = 0.1 / np.sqrt(0.001)
    assert step < 2 or np.abs(expected).max() > most
    expected = np.clip(expected, -most, most) + 0.1
    np.testing.assert_allclose(
      updates["a"], -0.1 * expected, rtol=1e-4, atol=5e-6
    )


def test_parameters_and_memories_are_those_of_the_reference():
  """Whose rate scales what enters the memory, too, and whose tiles are rows."""
  head = codecs.tiles(chunk=4, fit="divide", shape="row")
  selected = codecs.contributors(codecs.topk_columns(count=3))
  codec = codecs.feedback(codecs.chain(head, selected), decay=0.95)
  tx = optax.chain(
    optax.scale_by_learning_rate(0.5, flip_sign=False),
    jaxmotion.exchange("data", codec, method="gather"),
    optax.scale_by_learning_rate(0.5),
  )
  state, update = make_run(tx)
  groups = partition(codec, PARAMS).leaf_groups
  params = jax.tree.map(np.ones_like, PARAMS)

  @jax.jit
  def read_errors(states):
    """Errors of all workers, which a leaf's codec tells from its state."""
    pairs = zip(groups, states, strict=True)
    errors = [jax.vmap(g.codec.error)(part.first) for g, part in pairs]
    return jnp.concatenate([a.reshape(4, -1) for a in errors], 1)

  for step in range(6):
    updates, state = update(gradients(step), state)
    params = jax.tree.map(np.add, params, updates)
    expected = SPARSE_LOCO["params"][step]
    np.testing.assert_allclose(flatten(params), expected, atol=5e-6)
    for r, own in enumerate(read_errors(state[1].codec_state.value)):
      np.testing.assert_allclose(own, SPARSE_LOCO[f"error{r}"][step], atol=5e-6)


def test_with_all_elements_it_is_plain_sgd():
  tx = presets.sparse_loco("data", 0.5, count=64 * 64, bits=None)
  state, update = make_run(tx, pick(PARAMS))
  for step in range(2):
    updates, state = update(pick(gradients(step)), state)
    for k, found in updates.items():
      mean = gradients(step)[k].mean(0)
      np.testing.assert_allclose(found, -0.5 * mean, atol=5e-6)


def test_sparse_loco_encodes_columns_of_tiles_in_two_bits():
  tx = presets.sparse_loco("data", decay=0.9, count=3, chunk=8, span=4.0)
  state = trace_state(tx, PARAMS, MESH, "data")
  selected = codecs.chain(
    codecs.topk_columns(count=3), codecs.codebook(bits=2, span=4.0)
  )
  codec = codecs.chain(codecs.tiles(chunk=8), codecs.contributors(selected))
  (exchange,) = find_exchanges(state)
  assert exchange.made_for.codecs[0] == codecs.feedback(codec, decay=0.9)


def rate(count):
  return 0.5 / (1 + count)


def cosines(n):
  k, i = np.ogrid[:n, :n]
  rows = np.cos(np.pi * (2 * i + 1) * k / (2 * n)) * np.sqrt(2 / n)
  rows[0] /= np.sqrt(2)
  return rows


def side(n):
  return min(n, CHUNK)


def to_tiles(x):
  rows, columns = x.shape
  h, w = side(rows), side(columns)
  cut = x.reshape(rows // h, h, columns // w, w).transpose(0, 2, 1, 3)
  return (cosines(h) @ cut @ cosines(w).T).reshape(-1, h * w)


def from_tiles(tiles, shape):
  rows, columns = shape
  h, w = side(rows), side(columns)
  cut = tiles.reshape(rows // h, columns // w, h, w)
  cut = cosines(h).T @ cut @ cosines(w)
  return cut.transpose(0, 2, 1, 3).reshape(shape)


def demo_updates(name, steps):
  """Signs of the updates of one leaf, in float64."""
  shape = gradients(0)[name].shape[1:]
  matrix = shape if len(shape) == 2 else (1, *shape)
  momenta = np.zeros((4, *matrix))
  for step in range(steps):
    total, count = 0, 0
    for r in range(4):
      momenta[r] *= DECAY
      momenta[r] += rate(step) * gradients(step)[name][r].reshape(matrix)
      tiles = to_tiles(momenta[r])
      least = np.sort(np.abs(tiles), axis=1)[:, -COUNT:][:, :1]
      sent = np.where(np.abs(tiles) >= least, tiles, 0)
      momenta[r] -= from_tiles(sent, matrix)
      total, count = total + sent, count + (sent != 0)
    mean = from_tiles(total / np.maximum(count, 1), matrix)
    yield -rate(step) * (np.sign(mean) + 0.1).reshape(shape), mean


def test_demo_updates_are_those_of_the_definition():
  tx = presets.demo(
    "data", rate, decay=DECAY, count=COUNT, chunk=CHUNK, weight_decay=0.1
  )
  ones = {k: np.ones(a.shape, np.float32) for k, a in pick(PARAMS).items()}
  state, update = make_run(tx, ones)
  expected = {name: demo_updates(name, 6) for name in ones}
  for step in range(6):
    updates, state = update(pick(gradients(step)), state)
    for name, found in updates.items():
      exact, mean = next(expected[name])
      # Where float32 decides the sign, it may be the other.
      clear = np.abs(mean.reshape(exact.shape)) > 1e-5
      assert clear.mean() > 0.9
      np.testing.assert_allclose(
        np.asarray(found)[clear], exact[clear], rtol=1e-5
      )


def test_the_rate_may_be_injected():
  make = optax.inject_hyperparams(
    presets.demo, static_args=("axis_name", "decay", "count", "chunk")
  )
  state, update = make_run(make("data", 0.25), {"a": PARAMS["a"]})
  updates, _ = update({"a": gradients(0)["a"]}, state)
  np.testing.assert_allclose(np.abs(updates["a"]), 0.25)


def with_zeros(step):
  """Gradients whose every third element is zero."""
  grads = pick(gradients(step))
  for a in grads.values():
    a.reshape(4, -1)[:, ::3] = 0
  return grads


def lion(step, mu, b1=0.9, b2=0.99):
  """Signs that the majority has, and the new momenta."""
  grads = with_zeros(step)
  votes = jax.tree.map(lambda m, g: np.sign(b1 * m + (1 - b1) * g), mu, grads)
  mu = jax.tree.map(lambda m, g: b2 * m + (1 - b2) * g, mu, grads)
  return jax.tree.map(lambda a: np.sign(a.sum(0)), votes), mu


def signum(step, mu):
  mu = jax.tree.map(lambda m, g: 0.9 * m + g, mu, with_zeros(step))
  return jax.tree.map(lambda a: np.sign(np.sign(a).sum(0)), mu), mu


@pytest.mark.parametrize("name", ["lion", "signum"])
def test_updates_are_the_signs_of_most_workers_momenta(name):
  tx = getattr(presets, name)("data", 0.5, weight_decay=0.1)
  ones = jax.tree.map(np.ones_like, pick(PARAMS))
  state, update = make_run(tx, ones)
  mu = jax.tree.map(lambda a: np.zeros_like(a, np.float64), with_zeros(0))
  for step in range(3):
    updates, state = update(with_zeros(step), state)
    signs, mu = {"lion": lion, "signum": signum}[name](step, mu)
    for key, found in updates.items():
      np.testing.assert_allclose(found, -0.5 * (signs[key] + 0.1), rtol=1e-6)
