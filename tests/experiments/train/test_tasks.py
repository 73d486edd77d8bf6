import math

import jax.numpy as jnp
import numpy as np
import pytest

from experiments.common.console import JobError
from experiments.data import images
from experiments.train import tasks


class Constant:
  """A model that answers the same logits whatever it is shown."""

  def __init__(self, logits):
    self.logits = logits

  def __call__(self, x):
    shape = x.shape[:1] if x.ndim == 4 else x.shape
    return jnp.broadcast_to(self.logits, (*shape, self.logits.size))


def score(task, model):
  total = sum(float(task.score_sum(model, b)) for b in task.test())
  return total / task.score_divisor


def test_accuracy_of_a_constant_answer_is_the_share_of_its_label(tiny):
  task = tasks.load_task(tiny("digits"))
  labels = images.load_digits().test.labels
  for label in range(10):
    logits = jnp.zeros(10).at[label].set(1.0)
    share = 100 * np.mean(labels == label)
    assert score(task, Constant(logits)) == pytest.approx(share, rel=1e-6)


def test_uniform_bytes_cost_eight_bits(tiny):
  task = tasks.load_task(tiny("bytes_lm"))
  assert score(task, Constant(jnp.zeros(256))) == pytest.approx(8, rel=1e-5)
  loss = task.loss(Constant(jnp.zeros(256)), task.batch(0, 0))
  assert float(loss) == pytest.approx(math.log(256), rel=1e-5)


def test_padding_of_the_last_batch_weighs_nothing():
  items = {"x": np.arange(300)}
  first, last = tasks._pad_batches(items)
  assert first["x"].shape == last["x"].shape
  weights = np.concatenate([first["weight"], last["weight"]])
  assert weights.sum() == 300
  assert last["x"][last["weight"] > 0].tolist() == list(range(256, 300))


def test_pixels_are_centered(tiny):
  pixels = tasks.load_task(tiny("digits", batch_size=64)).batch(0, 0)["pixels"]
  assert pixels.dtype == np.float32
  assert pixels.min() == -1
  assert pixels.max() == 1


def test_text_brings_its_digest_and_baseline(tiny):
  facts = {name: v for name, v, _ in tasks.load_task(tiny("bytes_lm")).facts}
  assert len(facts["corpus_sha256"]) == 64
  assert 0 < facts["zlib9_bits_per_byte"] < 8


def test_unknown_model_is_named(tiny):
  with pytest.raises(JobError, match=r"`config.model` must .*got 'mlp'"):
    tasks.load_task(tiny("digits", model="mlp"))
