"""Presets against NumPy at other ranks, bits, shapes and numbers of workers."""

import jax
import numpy as np
import pytest
from jax.sharding import Mesh

import jaxmotion
from jaxmotion import codecs, core, presets
from tests.presets.reference import make_run

WORKERS = 3
MESH = Mesh(np.array(jax.devices()[:WORKERS]), ("data",))


def gradients(seed, shapes):
  rng = np.random.default_rng(seed)
  return {
    name: rng.normal(size=(WORKERS, *shape)).astype(np.float32)
    for name, shape in shapes.items()
  }


def make_presets_run(tx, shapes):
  params = {name: np.zeros(s, np.float32) for name, s in shapes.items()}
  return make_run(tx, params, MESH)


def orthogonalize(matrix):
  matrix = matrix.copy()
  for i in range(matrix.shape[1]):
    matrix[:, i] /= np.linalg.norm(matrix[:, i])
    rest = matrix[:, i + 1 :]
    rest -= np.outer(matrix[:, i], matrix[:, i] @ rest)
  return matrix


@pytest.mark.parametrize("view", ["first", "last"])
def test_power_sgd_of_rank_3_is_the_definition(view):
  shape = (5, 7, 13)
  a, b = (5, 91) if view == "first" else (35, 13)
  shapes = {"matrix": shape, "vector": (17,)}
  tx = presets.power_sgd("data", rank=3, start=0, form="global", view=view)
  state, update = make_presets_run(tx, shapes)
  right = np.random.default_rng(9).normal(size=(b, 3))
  first = core.map_shared(
    lambda x: x,
    lambda part: core.Shared(right[None].astype(np.float32), part.axes),
    state.codec_state.value,
  )
  made = state._replace(codec_state=jaxmotion.PerWorker(first))
  # Placed as before, so that the second step is not traced again.
  state = jax.device_put(made, jax.tree.map(lambda a: a.sharding, state))
  error = np.zeros((WORKERS, a, b))
  for step in range(3):  # Every step makes what float32 rounds twice as large.
    grads = gradients(step, shapes)
    means, state = update(grads, state)
    v = grads["matrix"].reshape(WORKERS, a, b) + error
    left = orthogonalize(v.sum(0) @ orthogonalize(right))
    right = v.mean(0).T @ left
    error = v - left @ right.T
    found = np.asarray(means["matrix"]).reshape(a, b)
    np.testing.assert_allclose(found, left @ right.T, atol=5e-6)
    np.testing.assert_allclose(
      means["vector"], grads["vector"].mean(0), atol=5e-6
    )


def test_onebit_of_three_workers_and_an_odd_size_is_the_reference():
  size, padded = 47, 72  # A multiple of 3 rows of 3 * 8 elements.
  shapes = {"x": (size,)}
  codec = codecs.onebit()
  state, update = make_presets_run(jaxmotion.exchange("data", codec), shapes)
  own, of_mean = np.zeros((WORKERS, padded)), np.zeros((WORKERS, padded // 3))

  def to_signs(x):
    scale = np.linalg.norm(x, axis=1, keepdims=True) / np.sqrt(x.shape[1])
    return np.where(x >= 0, scale, -scale)

  for step in range(3):
    grads = gradients(step, shapes)
    means, state = update(grads, state)
    own[:, :size] += grads["x"]
    sent = to_signs(own)
    own -= sent
    of_mean += sent.mean(0).reshape(WORKERS, -1)
    found = to_signs(of_mean)
    of_mean -= found
    np.testing.assert_allclose(means["x"], found.ravel()[:size], atol=5e-6)


def test_sparse_loco_in_two_bits_is_the_reference():
  """Without the transform, of a vector, which is cut into chunks."""
  chunk, count, decay, rate = 8, 3, 0.9, 0.5
  shapes = {"x": (64,)}
  tx = presets.sparse_loco(
    "data", rate, decay=decay, count=count, chunk=chunk, bits=2, as_coded=True
  )
  state, update = make_presets_run(tx, shapes)
  error = np.zeros((WORKERS, 8, chunk))
  for step in range(3):
    grads = gradients(step, shapes)
    updates, state = update(grads, state)
    error = decay * error + rate * grads["x"].reshape(error.shape)
    sent, senders = np.zeros((2, WORKERS, 8, chunk))
    for r in range(WORKERS):
      places = np.argsort(-np.abs(error[r]), axis=1)[:, :count]
      values = np.take_along_axis(error[r], places, 1)
      centered = values - values.mean()
      width = 6 * centered.std(ddof=1) / 4
      bins = np.clip(np.round(centered / width + 2), 0, 3)
      coded = values.mean() + sum(
        (bins == b) * centered[bins == b].mean() for b in np.unique(bins)
      )
      np.put_along_axis(sent[r], places, coded, 1)
      np.put_along_axis(senders[r], places, 1, 1)
    error -= sent
    mean = sent.sum(0) / np.maximum(senders.sum(0), 1)
    np.testing.assert_allclose(updates["x"], -rate * mean.ravel(), atol=5e-6)
