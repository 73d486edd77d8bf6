import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.common.checkpoint import Workdir
from experiments.weights import cases, trainer as weights_trainer
from jaxmotion import codecs


def assert_same_bits(a, b):
  assert jax.tree.structure(a) == jax.tree.structure(b)
  for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
    assert np.asarray(x).tobytes() == np.asarray(y).tobytes()


@pytest.fixture
def setup(tiny_hosted):
  return weights_trainer.load(tiny_hosted("weights_alexnet"))


def test_stopped_and_resumed_equals_straight(tmp_path, setup):
  trainer = weights_trainer.Trainer(setup, "int4_delta")
  straight = trainer.train(seed=0)
  workdir = Workdir(tmp_path, setup.config, weights_trainer.Run)
  checkpoints = workdir.open_store("int4_delta", 0)
  trainer.train(seed=0, checkpoints=checkpoints, stop=3)
  checkpoints.close()
  checkpoints = workdir.open_store("int4_delta", 0)
  seen = []
  resumed = trainer.train(
    seed=0,
    checkpoints=checkpoints,
    on_step=lambda done, loss: seen.append(done),
  )
  checkpoints.close()
  assert seen == [3, 4]  # Step 3 came after the checkpoint.
  assert_same_bits(straight[:3], resumed[:3])
  assert straight.log.loss == resumed.log.loss
  # What the device holds is part of it: see that there is something.
  assert any(np.any(x) for x in jax.tree.leaves(resumed.state.device_reference))


def test_finished_runs_are_not_repeated(tmp_path, setup):
  setup.config.cases = ("fp32", "awp")
  workdir = Workdir(tmp_path, setup.config, weights_trainer.Run)
  first = weights_trainer.run_job(setup, workdir=workdir)

  class Witness:
    def begin_run(self, case, seed):
      raise AssertionError("nothing is left to do")

  again = Workdir(tmp_path, setup.config, weights_trainer.Run)
  second = weights_trainer.run_job(setup, workdir=again, display=Witness())
  assert second == first


def test_static_cases_send_the_bytes_of_their_codec(setup):
  ratios = {}
  for name in ("fp32", "truncate2"):
    trainer = weights_trainer.Trainer(setup, name)
    run = trainer.measure(0, trainer.train(seed=0))
    ratios[name] = run.plain_bytes / run.sent_bytes
    assert run.switches == [[0, g, 0] for g in range(len(run.groups))]
    assert [step for step, _ in run.curve] == [2, 4]
  assert ratios["fp32"] == 1
  assert 1.8 < ratios["truncate2"] < 2  # Biases stay floats.


def test_a_layer_is_a_group_and_biases_are_of_none(setup):
  trainer = weights_trainer.Trainer(setup, "awp")
  model = setup.model(0)
  groups = trainer.store.groups_of(model.params)
  assert list(groups.names) == [name for name, _ in model.stages]
  in_groups = [x.ndim for part in groups.split(model.params) for x in part]
  assert set(in_groups) == {2, 4}


def test_weights_arrive_as_they_are_coded(setup):
  trainer = weights_trainer.Trainer(setup, "truncate1")
  model = setup.model(0)
  params, case = model.params, cases.get_case("truncate1")
  state = trainer.store.init(params, model.stats)
  there = weights_trainer.arrived(case, trainer.store, state, np.zeros(9, int))
  kernel = params["05_dense"]["dense"]["kernel"]
  codec = codecs.truncate(bytes=1)
  expected = codec.decode(codec.encode(kernel)[0], kernel)
  np.testing.assert_array_equal(there["05_dense"]["dense"]["kernel"], expected)
  assert_same_bits(
    there["05_dense"]["dense"]["bias"], params["05_dense"]["dense"]["bias"]
  )


def test_differences_arrive_as_what_the_device_holds(setup):
  trainer = weights_trainer.Trainer(setup, "int4_delta")
  run = trainer.train(seed=0)
  case = cases.get_case("int4_delta")
  there = weights_trainer.arrived(
    case, trainer.store, run.state, trainer.level(run)
  )

  def distance(x, y):
    return float(jnp.linalg.norm(x - y) / jnp.linalg.norm(y))

  far = jax.tree.map(distance, there, run.state.params)
  # The last update is missing, and a step of the codes: less than a tenth of
  # any weights, which another layer's would not be.
  assert max(jax.tree.leaves(far)) < 0.1
  assert max(jax.tree.leaves(far)) > 0


def test_the_error_is_that_of_the_whole_test_set(setup):
  trainer = weights_trainer.Trainer(setup, "fp32")
  run = trainer.train(seed=0, stop=1)
  images = setup.data.test
  x = jnp.asarray(images.pixels, jnp.float32) / 127.5 - 1
  for (name, stage), own in zip(
    setup.model(0).stages, run.state.stats, strict=True
  ):
    x = stage.evaluate(run.state.params[name], own, x)
  wrong = np.mean(np.asarray(jnp.argmax(x, axis=-1)) != images.labels)
  assert trainer.error(run) == pytest.approx(100 * wrong, abs=1e-3)


def test_a_run_that_diverges_ends_there_and_is_measured(tiny_hosted):
  config = tiny_hosted("weights_alexnet", learning_rate=1e30)
  trainer = weights_trainer.Trainer(weights_trainer.load(config), "fp32")
  run = trainer.measure(0, trainer.train(seed=0))
  assert run.steps < config.steps
  assert not np.isfinite(run.loss)
