import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.common.workdir import Workdir
from experiments.weights.cases import get_case
from experiments.weights.context import load_context
from experiments.weights.run import train_all
from experiments.weights.store import received_weights
from experiments.weights.trainer import Run, Trainer
from jaxmotion import codecs


def assert_same_bits(a, b):
  assert jax.tree.structure(a) == jax.tree.structure(b)
  for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
    assert np.asarray(x).tobytes() == np.asarray(y).tobytes()


@pytest.fixture
def context(tiny_hosted):
  return load_context(tiny_hosted("weights_alexnet"))


def test_stopped_and_resumed_equals_straight(tmp_path, context):
  trainer = Trainer(context, "int4_delta")
  straight, straight_log = trainer.train_seed(seed=0)
  workdir = Workdir(tmp_path, context.config, Run)
  store = workdir.open_store("int4_delta", 0)
  trainer.train_seed(seed=0, store=store, stop=3)
  store = workdir.open_store("int4_delta", 0)
  seen = []
  resumed, resumed_log = trainer.train_seed(
    seed=0, store=store, on_step=lambda done, loss: seen.append(done)
  )
  assert seen == [3, 4]  # Step 3 came after the checkpoint.
  assert_same_bits(straight, resumed)
  assert straight_log.loss == resumed_log.loss
  # The weights on the device are part of the state: see that there are some.
  assert any(np.any(x) for x in jax.tree.leaves(resumed.state.device_reference))


def test_finished_runs_are_not_repeated(tmp_path, context):
  context.config.cases = ("fp32", "awp")
  workdir = Workdir(tmp_path, context.config, Run)
  first = train_all(context, workdir=workdir)

  class Witness:
    def begin_run(self, case, seed):
      raise AssertionError("nothing is left to do")

  again = Workdir(tmp_path, context.config, Run)
  second = train_all(context, workdir=again, display=Witness())
  assert second == first


def test_static_cases_send_the_bytes_of_their_codec(context):
  ratios = {}
  for name in ("fp32", "truncate2"):
    trainer = Trainer(context, name)
    run = trainer.summarize_run(0, *trainer.train_seed(seed=0))
    ratios[name] = run.plain_bytes / run.sent_bytes
    assert run.switches == [[0, g, 0] for g in range(len(run.groups))]
    assert [step for step, _ in run.curve] == [2, 4]
  assert ratios["fp32"] == 1
  assert 1.8 < ratios["truncate2"] < 2  # Biases stay floats.


def test_a_stage_is_a_group_without_its_biases(context):
  trainer = Trainer(context, "awp")
  model = context.make_model(0)
  groups = trainer.store.groups_of(model.params)
  assert list(groups.names) == [name for name, _ in model.stages]
  in_groups = [x.ndim for part in groups.split(model.params) for x in part]
  assert set(in_groups) == {2, 4}


def test_received_weights_are_decoded_payloads(context):
  trainer = Trainer(context, "truncate1")
  model = context.make_model(0)
  params, case = model.params, get_case("truncate1")
  state = trainer.store.init(params, model.stats)
  level = np.zeros(len(model.stages), int)
  received = received_weights(case, trainer.store, state, level)
  (name, *_) = [name for name in params if name.endswith("_dense")]
  kernel = params[name]["dense"]["kernel"]
  codec = codecs.truncate(bytes=1)
  expected = codec.decode(codec.encode(kernel)[0], kernel)
  np.testing.assert_array_equal(received[name]["dense"]["kernel"], expected)
  assert_same_bits(
    received[name]["dense"]["bias"], params[name]["dense"]["bias"]
  )


def test_differences_add_up_to_the_weights_on_the_host(context):
  trainer = Trainer(context, "int4_delta")
  run, _ = trainer.train_seed(seed=0)
  received = received_weights(
    get_case("int4_delta"), trainer.store, run.state, trainer.level(run)
  )

  def distance(x, y):
    return float(jnp.linalg.norm(x - y) / jnp.linalg.norm(y))

  distances = jax.tree.map(distance, received, run.state.params)
  # The last update is missing, and a step of the codes: less than a tenth of
  # any weights, which another layer's would not be.
  assert max(jax.tree.leaves(distances)) < 0.1
  assert max(jax.tree.leaves(distances)) > 0


def test_the_error_is_that_of_the_whole_test_set(context):
  trainer = Trainer(context, "fp32")
  run, _ = trainer.train_seed(seed=0, stop=1)
  images = context.data.test
  x = jnp.asarray(images.pixels, jnp.float32) / 127.5 - 1
  for (name, stage), own_stats in zip(
    context.make_model(0).stages, run.state.stats, strict=True
  ):
    x = stage.evaluate(run.state.params[name], own_stats, x)
  wrong = np.mean(np.asarray(jnp.argmax(x, axis=-1)) != images.labels)
  assert trainer.test_error(run) == pytest.approx(100 * wrong, abs=1e-3)


def test_a_run_that_diverges_ends_there_and_is_summarized(tiny_hosted):
  config = tiny_hosted("weights_alexnet", learning_rate=1e30)
  trainer = Trainer(load_context(config), "fp32")
  run = trainer.summarize_run(0, *trainer.train_seed(seed=0))
  assert run.steps < config.steps
  assert not np.isfinite(run.loss)
