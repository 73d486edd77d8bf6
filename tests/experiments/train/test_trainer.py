import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from experiments.common.console import JobError
from experiments.common.workdir import Workdir
from experiments.data import images
from experiments.train import tasks, trainer as trainers
from experiments.train.cases import get_exchange
from experiments.train.mesh import make_mesh
from experiments.train.optimizer import make_optimizer
from experiments.train.run import open_workdir, run_experiment
from jaxmotion import wire
from tests.experiments.jobs import assert_same_bits

FEEDBACK = "sign_feedback"
SHARDED = "sharded_int8"


@pytest.fixture(scope="module")
def make_trainer(tiny):
  """Makes the trainer of an exchange and a number of workers, once."""

  @functools.cache
  def make(exchange, workers=2):
    config = tiny("digits", steps=6, checkpoint_every=2, workers=workers)
    task = tasks.load_task(config)
    return trainers.Trainer(config, task, make_mesh(workers), exchange)

  return make


class Recorder:
  """Keeps the scalars that a writer gets, by step."""

  def __init__(self):
    self.found = {}

  def write(self, step, scalars):
    self.found.setdefault(step, {}).update(scalars)


def test_stopped_and_resumed_equals_straight(
  tmp_path, make_trainer, capsys, monkeypatch
):
  trainer = make_trainer(FEEDBACK)
  monkeypatch.setattr(trainers, "_SCALARS_EVERY", 3)
  writer = Recorder()
  straight = trainer.train_seed(seed=0, writer=writer)
  assert sorted(writer.found) == [3, 6]
  assert writer.found[6]["loss"] == straight.log.loss[-1]
  assert int(writer.found[6]["exchange/updates"]) == 6
  assert float(writer.found[6]["exchange/error_norm"]) > 0
  # Error memory is part of what has to survive: see that there is some.
  memory = jax.tree.leaves(straight.state.opt_state[0].codec_state)
  assert any(np.any(np.asarray(leaf)) for leaf in memory)

  workdir = Workdir(tmp_path, trainer._config)
  store = workdir.open_store(FEEDBACK, 0)
  trainer.train_seed(seed=0, store=store, stop=3)
  store = workdir.open_store(FEEDBACK, 0)
  seen = []
  resumed = trainer.train_seed(
    seed=0, store=store, on_step=lambda done, loss: seen.append(done)
  )
  assert seen == [3, 4, 5, 6]  # Step 3 came after the checkpoint.
  told = capsys.readouterr().err
  assert f"{FEEDBACK}-seed0: resumed from step 2.\n" in told
  assert_same_bits(straight.state, resumed.state)
  assert straight.log.loss == resumed.log.loss


@pytest.mark.parametrize(
  "exchange", [FEEDBACK, pytest.param(SHARDED, marks=pytest.mark.slow)]
)
def test_other_workers_continue_a_run(tmp_path, make_trainer, capfd, exchange):
  def train(workers, stop=None):
    trainer = make_trainer(exchange, workers)
    workdir = open_workdir(tmp_path, trainer._config)
    store = workdir.open_store(exchange, 0)
    return trainer.train_seed(seed=0, store=store, stop=stop)

  before, resized = train(4, stop=2), train(2, stop=2)
  assert "a state of 4 workers continues on 2." in capfd.readouterr().err
  assert resized.log == before.log
  assert_same_bits(before.state.params, resized.state.params)
  if exchange == SHARDED:
    old, new = (jax.tree.leaves(t.state.opt_state) for t in (before, resized))
    pairs = zip(old, new, strict=True)
    whole = [(a, b) for a, b in pairs if a.shape == b.shape]
    assert sum(a.size > 64 for a, _ in whole) >= 3  # A master, two moments.
    assert_same_bits(*map(list, zip(*whole, strict=True)))
  else:
    # What is still to be sent is there; tests/checkpoint compares it.
    memory = jax.tree.leaves(resized.state.opt_state[0].codec_state)
    assert any(np.any(leaf) for leaf in memory)
  trained = train(2)
  assert len(trained.log.loss) == 6 and np.isfinite(trained.log.loss).all()
  assert_same_bits(trained.state, train(2).state)


# Of ml_collections, which reads the default configuration.
@pytest.mark.filterwarnings("ignore:the load_module:DeprecationWarning")
def test_a_job_trains_its_exchanges_and_writes_rows_and_a_plot(tiny, run_main):
  from experiments.train import __main__ as train_main

  config = tiny("digits", steps=12, batch_size=32, learning_rate=0.1)
  config.exchanges = ("fp32", "topk1_feedback")
  rows, said = run_main(train_main.main, plot=True, config=config)
  assert "computed from the bytes" in said
  assert all("cores, 8 x cpu" in row.machine for row in rows)
  found = {(row.case, row.metric): row.value for row in rows}
  cases = list(dict.fromkeys(row.case for row in rows))
  assert cases == list(config.exchanges)
  sent = [found[case, "wire_bytes_predicted"] for case in cases]
  assert sent[0] > sent[1]
  for case in cases:
    assert found[case, "loss"] < math.log(10)
    predicted = found[case, "wire_bytes_predicted"]
    assert predicted == found[case, "wire_bytes_compiled"]
    assert 0 <= found[case, "test_accuracy"] <= 100


def test_full_digits_model_sends_few_bytes(load_config):
  config = load_config("digits")
  model = tasks.load_task(config).build(0)
  params = nnx.to_pure_dict(nnx.state(model, nnx.Param))
  sent = {
    name: wire.payload_bytes(get_exchange(name), params)
    for name in config.exchanges
  }
  # Biases, scales and positions are counted.
  for name, ratio in {
    "bf16": 1.99,
    "int8": 3.9,
    "int4_feedback": 7.7,
    "topk1_feedback": 60,
    "sign_feedback": 28,
  }.items():
    assert sent["fp32"] / sent[name] >= ratio


def test_a_score_is_of_the_whole_test_set_and_seeds_share_a_program(
  make_trainer,
):
  trainer = make_trainer(FEEDBACK)
  task = trainer._task
  params = trainer.train_seed(seed=0, stop=1).state.params
  program = trainer.program
  trainer.train_seed(seed=1, stop=1)
  assert trainer.program is program
  test = images.load_digits().test
  batch = tasks._image_batch(test, slice(None))
  graph = nnx.graphdef(task.build(0))
  answer = jax.jit(lambda params, x: nnx.merge(graph, params)(x).argmax(-1))
  right = np.asarray(answer(params, batch["pixels"])) == test.labels
  score = trainers.make_score(task)(params)
  assert score == pytest.approx(100 * float(right.mean()), abs=1e-3)


@pytest.mark.parametrize("name", ["sgd", "adamw"])
def test_learning_rate_ends_at_zero(tiny, name):
  config = tiny("digits", optimizer=name, steps=4, weight_decay=0.0)
  tx = make_optimizer(config)
  params = jnp.ones(3)
  state, update = tx.init(params), jax.jit(tx.update)
  sizes = []
  for _ in range(5):
    updates, state = update(jnp.ones(3), state, params)
    sizes.append(float(jnp.abs(updates).max()))
  assert sizes[0] == 0
  assert max(sizes) == max(sizes[1:3]) > 0
  assert sizes[4] == pytest.approx(0, abs=1e-7)


@pytest.mark.parametrize(
  ("fields", "message"),
  [
    ({"optimizer": "lion"}, r"`config.optimizer` .*got 'lion'"),
    ({"warmup_steps": 3, "steps": 3}, r"`config.warmup_steps` .*got 3"),
  ],
)
def test_optimizer_settings_are_checked(tiny, fields, message):
  with pytest.raises(JobError, match=message):
    make_optimizer(tiny("digits", **fields))


def test_a_loss_that_is_not_finite_ends_the_job_with_a_message(tiny):
  config = tiny("digits", exchanges=("fp32",), learning_rate=1e30)
  with pytest.raises(SystemExit, match=r"Stopped: loss must be finite, got"):
    run_experiment(config)


def test_too_many_workers_are_refused():
  many = jax.device_count() + 1
  with pytest.raises(JobError, match=rf"got {many} for"):
    make_mesh(many)
