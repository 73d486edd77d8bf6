import functools
import signal

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.common.workdir import Workdir
from experiments.weights import cases, run as weights_run
from experiments.weights.cases import get_case
from experiments.weights.context import load_context
from experiments.weights.model import StageCost
from experiments.weights.profile import PARTS, profile_steps
from experiments.weights.run import train_all
from experiments.weights.trainer import Run, Trainer, received_weights
from jaxmotion import codecs, controllers, wire
from tests.experiments.jobs import assert_same_bits


# By the library that reads the default configuration.
@pytest.mark.filterwarnings("ignore:the load_module:DeprecationWarning")
def test_job_prints_tables_and_writes_rows_and_a_plot(
  tmp_path, tiny_hosted, monkeypatch, run_main
):
  from experiments.weights import __main__ as command

  config = tiny_hosted("weights_alexnet", cases=("fp32", "awp"))
  # Lowering the paper's network takes longer than the job: see test_staged.
  monkeypatch.setattr(weights_run, "vgg_a_costs", lambda: [StageCost(9, 4.0)])
  given = {"link": "pcie5_x16", "workdir": str(tmp_path / "job")}
  rows, said = run_main(command.main, plot=True, config=config, **given)
  # A signal that another test sends still is that test's own.
  assert signal.set_wakeup_fd(-1) == -1
  for part in ("153.93", "0.853", "pcie5_x16", "Predicted ms"):
    assert part in said
  ours = {row.case for row in rows if not row.case.startswith("paper_")}
  assert ours == {"fp32", "awp"}
  cells = {(row.case, row.metric): row for row in rows}
  assert len(cells) == len(rows)
  assert cells["fp32", "sent_ratio"].value == 1
  assert cells["awp", "sent_ratio"].value > 3
  # Here the host is the device: no transfer was measured.
  assert all(
    "emulated" in row.unit
    for (case, metric), row in cells.items()
    if case in ours and ("host_ms" in metric or "device_ms" in metric)
    if not metric.startswith("predicted")
  )

  class Witness:
    def begin_run(self, case, seed):
      raise AssertionError("nothing is left to do")

  done = Workdir(tmp_path / "job", config, Run)
  runs = train_all(load_context(config), workdir=done, display=Witness())
  assert [run.case for run in runs] == ["fp32", "awp"]


@pytest.fixture(scope="module")
def context(tiny_hosted):
  return load_context(tiny_hosted("weights_alexnet"))


@pytest.fixture(scope="module")
def train(context):
  """Returns trainer, state and log of a case, which is trained once."""

  @functools.cache
  def train_case(name):
    trainer = Trainer(context, name)
    return trainer, *trainer.train_seed(seed=0)

  return train_case


def test_stopped_and_resumed_equals_straight(tmp_path, context, train):
  trainer, straight, straight_log = train("int4_delta")
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


def test_a_static_case_sends_the_bytes_of_its_codec(train):
  trainer, state, log = train("truncate1")
  run = trainer.summarize_run(0, state, log)
  assert run.switches == [[0, g, 0] for g in range(len(run.groups))]
  assert [step for step, _ in run.curve] == [2, 4]
  assert 3 < run.plain_bytes / run.sent_bytes < 4  # Biases stay floats.


def test_received_weights_are_decoded_payloads(context, train):
  trainer, run, _ = train("truncate1")
  params = run.state.params
  # A stage is a group without its biases.
  groups = trainer.store.groups_of(params)
  assert list(groups.names) == [
    name for name, _ in context.make_model(0).stages
  ]
  in_groups = [x.ndim for part in groups.split(params) for x in part]
  assert set(in_groups) == {2, 4}
  received = received_weights(
    get_case("truncate1"), trainer.store, run.state, trainer.level(run)
  )
  (name, *_) = [name for name in params if name.endswith("_dense")]
  kernel = params[name]["dense"]["kernel"]
  codec = codecs.truncate(bytes=1)
  expected = codec.decode(codec.encode(kernel)[0], kernel)
  np.testing.assert_array_equal(received[name]["dense"]["kernel"], expected)
  assert_same_bits(
    received[name]["dense"]["bias"], params[name]["dense"]["bias"]
  )


def test_differences_add_up_to_the_weights_on_the_host(train):
  trainer, run, _ = train("int4_delta")
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


def test_the_error_is_that_of_the_whole_test_set(context, train):
  trainer, run, _ = train("truncate1")
  images = context.data.test
  received = received_weights(
    get_case("truncate1"), trainer.store, run.state, trainer.level(run)
  )
  x = jnp.asarray(images.pixels, jnp.float32) / 127.5 - 1
  for (name, stage), own_stats in zip(
    context.make_model(0).stages, run.state.stats, strict=True
  ):
    x = jax.jit(stage.evaluate)(received[name], own_stats, x)
  wrong = np.mean(np.asarray(jnp.argmax(x, axis=-1)) != images.labels)
  assert trainer.test_error(run) == pytest.approx(100 * wrong, abs=1e-3)


def test_a_run_that_diverges_ends_there_and_is_summarized(
  context, train, monkeypatch
):
  def load_batch(seed, index):
    batch = context.batch(seed, index)
    return batch | {"pixels": batch["pixels"] + (np.nan if index else 0)}

  trainer, *_ = train("truncate1")
  monkeypatch.setattr(trainer, "_context", context._replace(batch=load_batch))
  run = trainer.summarize_run(0, *trainer.train_seed(seed=0))
  assert run.steps == 2
  assert not np.isfinite(run.loss)


def test_a_rung_has_the_bits_it_is_said_to():
  like = jax.ShapeDtypeStruct((512, 512), "float32")
  for case in cases.CASES.values():
    for codec, bits in zip(case.weights, case.bits, strict=True):
      moved = wire.payload_bytes(codec, like) * 8 / like.size
      assert bits <= moved < bits + 0.3, case  # Scales of blocks.


def test_awp_has_the_papers_threshold_and_the_runs_interval(load_config):
  thresholds = {"alexnet": -5e-2, "vgg": -2e-3, "resnet": -2e-5}
  for name, threshold in thresholds.items():
    config = load_config(f"weights_{name}")
    controller = cases.make_controller(cases.get_case("awp"), config)
    assert controller.threshold == threshold
    assert controller.interval == config.awp_interval
  # Static cases stay where they are.
  static = cases.make_controller(cases.get_case("int8"), config)
  assert static == controllers.fixed(0)


def test_a_step_is_timed_by_its_parts(tiny_hosted):
  context = load_context(tiny_hosted("weights_alexnet", cases=("awp", "int8")))
  rounds = []
  awp, int8 = profile_steps(
    context, {"awp": 1}, on_round=lambda: rounds.append(1)
  )
  assert len(rounds) == 2 * 3  # Truncation is there to compare packing with.
  for profile in (awp, int8):
    assert set(profile.ms) == set(PARTS)
    assert all(ms > 0 for ms in profile.ms.values())
  # Biases stay floats; each weight is sent as two bytes, or as one.
  plain = awp.returned_bytes
  assert awp.plain_bytes == int8.plain_bytes == plain
  assert plain / awp.sent_bytes == pytest.approx(2, rel=0.1)
  assert int8.sent_bytes == int8.returned_bytes < plain / 3
  # Arrays of a stage: a kernel and a bias, or two planes and a bias, or codes,
  # scales and a bias.
  stages = len(context.make_model(0).stages)
  arrays = [awp.returns, awp.sends, int8.sends, int8.returns]
  assert arrays == [2 * stages, 3 * stages, 3 * stages, 3 * stages]
