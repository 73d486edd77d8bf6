"""The preset computes what DeMo's definition says, written here in numpy."""

import numpy as np
import optax

from jaxmotion import presets
from tests.presets.reference import PARAMS, gradients, make_run, pick

DECAY, COUNT, CHUNK = 0.9, 3, 6


def rate(count):
  return 0.5 / (1 + count)


def cosines(n):
  k, i = np.ogrid[:n, :n]
  rows = np.cos(np.pi * (2 * i + 1) * k / (2 * n)) * np.sqrt(2 / n)
  rows[0] /= np.sqrt(2)
  return rows


def side(n):
  return max(d for d in range(1, CHUNK + 1) if n % d == 0)


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


def reference(name, steps):
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


def test_updates_are_those_of_the_definition():
  tx = presets.demo(
    "data",
    rate,
    decay=DECAY,
    count=COUNT,
    chunk=CHUNK,
    weight_decay=0.1,
    as_coded=True,
  )
  ones = {k: np.ones(a.shape, np.float32) for k, a in pick(PARAMS).items()}
  state, update = make_run(tx, ones)
  expected = {name: reference(name, 6) for name in ones}
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
  state, update = make_run(make("data", 0.25), pick(PARAMS))
  updates, _ = update(pick(gradients(0)), state)
  np.testing.assert_allclose(np.abs(updates["a"]), 0.25)
