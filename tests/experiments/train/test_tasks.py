import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from experiments.common.console import JobError
from experiments.data import images
from experiments.train import cases, tasks, trainer
from experiments.train.presets import PRESETS, Settings
from jaxmotion import codecs, make_train_step, wire
from jaxmotion.transforms.extend import find_exchanges, trace_state


class Constant:
  """A model that answers the same logits whatever it is shown."""

  def __init__(self, logits):
    self.logits = logits

  def __call__(self, x):
    shape = x.shape[:1] if x.ndim == 4 else x.shape
    return jnp.broadcast_to(self.logits, (*shape, self.logits.size))


def score(task, logits):
  """The score of a model that answers the same whatever it is shown."""
  # Logits are an argument: XLA takes long to fold constants.
  sum_up = jax.jit(lambda logits, b: task.score_sum(Constant(logits), b))
  total = sum(float(sum_up(logits, batch)) for batch in task.test())
  return total / task.score_divisor


def test_pixels_are_centered_and_a_constant_answer_scores_its_share(tiny):
  task = tasks.load_task(tiny("digits", batch_size=64))
  pixels = task.batch(0, 0)["pixels"]
  assert pixels.dtype == np.float32
  assert (pixels.min(), pixels.max()) == (-1, 1)
  labels = images.load_digits().test.labels
  for label in (0, 9):
    logits = jnp.zeros(10).at[label].set(1.0)
    share = 100 * np.mean(labels == label)
    assert score(task, logits) == pytest.approx(share, rel=1e-6)


def test_uniform_bytes_cost_eight_bits_and_text_brings_its_digest(tiny):
  task = tasks.load_task(tiny("bytes_lm"))
  facts = {name: value for name, value, _ in task.facts}
  assert len(facts["corpus_sha256"]) == 64
  assert 0 < facts["zlib9_bits_per_byte"] < 8
  assert score(task, jnp.zeros(256)) == pytest.approx(8, rel=1e-5)
  find_loss = jax.jit(lambda logits, b: task.loss(Constant(logits), b))
  loss = find_loss(jnp.zeros(256), task.batch(0, 0))
  assert float(loss) == pytest.approx(math.log(256), rel=1e-5)


def test_padding_of_the_last_batch_weighs_nothing():
  items = {"x": np.arange(300)}
  first, last = tasks._pad_batches(items)
  assert first["x"].shape == last["x"].shape
  weights = np.concatenate([first["weight"], last["weight"]])
  assert weights.sum() == 300
  assert last["x"][last["weight"] > 0].tolist() == list(range(256, 300))


def test_unknown_model_is_named(tiny):
  with pytest.raises(JobError, match=r"`config.model` must .*got 'mlp'"):
    tasks.load_task(tiny("digits", model="mlp"))


GRADIENTS = {
  "conv": {"kernel": jnp.ones((30, 100)), "bias": jnp.ones(100)},
  "norm": {"scale": jnp.ones(10)},
}


@pytest.mark.parametrize(
  "name", ["int8", "int4_feedback", "topk1_feedback", "sign_feedback"]
)
def test_small_leaves_travel_as_they_are(name):
  assert cases.get_exchange("fp32") == codecs.identity()
  codec = cases.get_exchange(name)
  alone = {"kernel": GRADIENTS["conv"]["kernel"]}
  kernel_codec = codec.rules[-1][1]
  kernel_bytes = wire.payload_bytes(kernel_codec, alone)
  small_bytes = 4 * (100 + 10)
  assert wire.payload_bytes(codec, GRADIENTS) == kernel_bytes + small_bytes


@pytest.mark.parametrize(
  "name", [*PRESETS, "int8", "delayed_int8", "sharded_int8"]
)
def test_every_exchange_has_an_optimizer_behind_it(name):
  mesh = jax.make_mesh(
    (1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,)
  )
  settings = Settings(steps=20, weight_decay=0.01)
  cases.check_exchange(name)
  tx = cases.exchange_with(mesh, name, optax.sgd(0.1), settings)
  params = jax.tree.map(jnp.zeros_like, GRADIENTS)
  shapes = trace_state(tx, params, mesh, "data")
  assert find_exchanges(shapes)


def test_bytes_of_an_exchange_in_turns_are_the_mean_of_its_turns():
  name = "power_sgd_alternating"
  mesh = jax.make_mesh(
    (2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,)
  )
  tx = cases.exchange_with(mesh, name, optax.sgd(0.1), Settings(steps=20))
  init, step = make_train_step(lambda p, x: jnp.mean(x @ p), tx, mesh)
  given = (init(jnp.ones((512, 64))), jnp.ones((2, 512)))
  both, one = (
    trainer.compile_step(step, *given, branches=branches)
    for branches in (cases.settled_branches(name), (0,))
  )
  assert both.wire_bytes == both.compiled_bytes
  other_bytes = 2 * both.wire_bytes - one.wire_bytes
  # A turn sends a factor of rank 4: 512 or 64 rows. The loss takes 4 bytes.
  assert {one.wire_bytes, other_bytes} == {4 * 4 * 512 + 4, 4 * 4 * 64 + 4}
