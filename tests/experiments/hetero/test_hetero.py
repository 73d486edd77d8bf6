import dataclasses
import functools

import jax
import numpy as np
import pytest

from experiments import tables
from experiments.common import records
from experiments.common.console import JobError
from experiments.hetero import (
  gradients,
  rows as hetero_rows,
  run as hetero_run,
  trainer,
)
from experiments.hetero.cases import CASES, WORKERS, Settings, find_slowdowns

TINY = Settings(
  seeds=(0,), steps=6, settle=1, channels=(4, 4), hidden=8, draws=60
)


# Each way to deal the data takes a second or two.
examine_means = functools.cache(gradients.examine_means)


@pytest.fixture(scope="module")
def bench():
  return trainer.Bench(TINY)


def test_job_prints_tables_and_writes_rows_and_a_plot(
  bench, tmp_path, monkeypatch, capsys
):
  json, plot = tmp_path / "rows.jsonl", tmp_path / "plot.png"
  monkeypatch.setattr(hetero_run, "Bench", lambda settings: bench)
  monkeypatch.setattr(hetero_run, "examine_means", examine_means)
  monkeypatch.setattr(trainer, "_PROBES", 2)
  settings = dataclasses.replace(
    TINY, scenarios=("changing",), deals=("by_class",)
  )
  hetero_run.run_experiment(settings, json=str(json), plot=str(plot))
  printed = capsys.readouterr().out
  assert "emulated" in printed and "\x1b[" not in printed
  rows = records.read_rows(json)
  assert {row.experiment for row in rows} == {
    "hetero_changing_by_class",
    "hetero_gradient_by_class",
  }
  cells = {(row.experiment, row.case, row.metric) for row in rows}
  assert len(cells) == len(rows)
  assert {case for _, case, _ in cells} == {*CASES, "weighted", "plain_mean"}
  # Nothing here was measured on workers that run at the same time.
  timed = ("_ms", "_s")
  for row in rows:
    assert "emulated" in row.unit or not row.metric.endswith(timed)
  assert plot.read_bytes().startswith(b"\x89PNG")
  assert tables.render_markdown(rows).count("\n") == 1 + len(CASES)


def test_settings_are_checked():
  with pytest.raises(JobError, match="`steps` must be more than twice"):
    Settings(steps=20, settle=10)


def test_phases_take_equal_parts():
  seen = [find_slowdowns("changing", step, 6) for step in range(6)]
  assert seen == [(1, 1, 1, 4)] * 3 + [(2, 1, 1, 1)] * 3
  parts = hetero_rows.settled_phases("changing", TINY)
  assert parts == [slice(1, 3), slice(4, 6)]


def deal_rows(bench, deal, *args, **options):
  """A batch with axes of workers, microbatches and examples."""
  batch = bench.dealers[deal].deal_batch(*args, **options)
  return jax.tree.map(
    lambda a: a.reshape(WORKERS, TINY.total, -1, *a.shape[1:]), batch
  )


@pytest.mark.parametrize("deal", TINY.deals)
@pytest.mark.parametrize("counts", [(7, 7, 7, 7), (9, 9, 8, 2), (28, 0, 0, 0)])
def test_a_batch_has_every_microbatch_once(bench, deal, counts):
  batch = deal_rows(bench, deal, counts, (1, 1, 2, 4), 0, 3)
  assert batch["pixels"].shape == (WORKERS, TINY.total, 4, 8, 8, 1)
  assert batch["repeats"][:, 0, 0].tolist() == [1, 1, 2, 4]
  filled = np.arange(TINY.total) < np.array(counts)[:, None]
  pixels = batch["pixels"][filled].reshape(TINY.batch_size, -1)
  images = bench.dealers[deal].images["pixels"].reshape(-1, 64)
  assert (pixels[:, None] == images[None]).all(axis=2).any(axis=1).all()
  assert not batch["pixels"][~filled].any()


def test_workers_see_their_own_classes(bench):
  counts = (9, 9, 8, 2)
  batch = deal_rows(bench, "by_class", counts, (1,) * 4, 0, 0)
  seen = [set(batch["labels"][i, :n].ravel()) for i, n in enumerate(counts)]
  assert max(seen[0]) <= min(seen[1]) and max(seen[1]) <= min(seen[2])
  assert seen[3] == {9}


def test_weights_of_a_plain_mean_are_the_workers(bench):
  counts = (9, 9, 8, 2)
  batch = deal_rows(bench, "shuffled", counts, (1,) * 4, 0, 0, weighted=False)
  weight = batch["weight"][..., 0]
  totals = [weight[i, :n].sum() for i, n in enumerate(counts)]
  np.testing.assert_allclose(totals, 1.0, rtol=1e-6)


def test_turns_do_the_work_of_all_and_slowness_changes_no_number(bench):
  state = bench.init(bench.init_params(0))
  counts = (9, 9, 8, 2)
  dealer = bench.dealers["shuffled"]
  plain = bench.step.compute(
    state, dealer.deal_batch(counts, (1,) * 4, 0, 0), counts=counts
  )
  slow = dealer.deal_batch(counts, (1, 2, 1, 4), 0, 0)
  turns, seconds = trainer.take_turns(bench.step.compute, state, slow, counts)
  assert seconds.shape == (WORKERS,) and (seconds > 0).all()
  jax.tree.map(np.testing.assert_array_equal, turns.grads, plain.grads)
  assert turns.weight.tolist() == [36, 36, 32, 8]


def test_the_extra_work_is_in_the_compiled_program(bench):
  params = bench.init_params(0)
  batch = deal_rows(bench, "shuffled", (7,) * 4, (4,) * 4, 0, 0)
  one = jax.tree.map(lambda a: a[0, 0], batch)

  def compiled(loss):
    text = jax.jit(jax.grad(loss)).lower(params, one).compile().as_text()
    return text.count(" while("), text.count(" convolution(")

  loops, convolutions = compiled(bench.slow_loss)
  own_loops, once = compiled(bench.mean_loss)
  # All of the gradient is in the loop, and once more behind it.
  assert loops == 1 + 2 * own_loops
  assert convolutions == 2 * once > 0


def test_the_plain_mean_is_biased_and_noisier(bench):
  shuffled = examine_means(bench, "shuffled")
  by_class = examine_means(bench, "by_class")
  # Each worker's own classes: the plain mean is another gradient.
  assert by_class["plain_mean"].bias > 5 * by_class["plain_mean"].bias_noise
  assert by_class["weighted"].bias < by_class["plain_mean"].bias / 3
  for case in ("weighted", "plain_mean"):
    assert shuffled[case].bias < 3 * shuffled[case].bias_noise
  # Shuffled, it only has a greater variance: N mean(1 / n) / P times.
  predicted = gradients.predict_variance_ratio(gradients.examined_counts(bench))
  ratio = shuffled["plain_mean"].variance / shuffled["weighted"].variance
  assert ratio == pytest.approx(predicted, rel=0.3) and predicted > 1.4


def test_times_are_relative_to_work_split_exactly_by_speed():
  steps = Settings(steps=8, settle=1, seeds=(0,))

  def run(counts, seconds):
    return trainer.Run(
      *("one_2x", "shuffled", "case", 0, 90.0, 0.1),
      np.tile(counts, (8, 1)),
      np.tile(seconds, (8, 1)),
      np.full(8, 0.001),
      0,
    )

  equal = run((7, 7, 7, 7), (0.007, 0.007, 0.007, 0.014))
  even = hetero_rows.summarize_times(equal, equal, steps)
  assert even.ideal_ms == pytest.approx(8) and even.work_ms == 14
  assert even.ideal_ratio == even.balance_ratio == pytest.approx(14 / 8)
  ours = hetero_rows.summarize_times(
    run((8, 8, 8, 4), (0.008,) * 4), equal, steps
  )
  assert ours.ideal_ratio == pytest.approx(1)
  assert ours.step_ms == pytest.approx(9)


def test_speeds_are_measured_again_until_a_longer_turn_takes_longer(
  bench, monkeypatch
):
  turns = []

  def busy_turn(uneven, state, batch, counts):
    turns.append(counts)
    # At first, other work makes the shortest turns the slowest.
    taken = 1 / counts[0] if len(turns) < 30 else 0.001 * counts[0]
    return state, np.full(WORKERS, taken)

  monkeypatch.setattr(trainer, "take_turns", busy_turn)
  speeds, _ = bench.measure_speeds(bench.dealers["shuffled"], (1,) * WORKERS)
  np.testing.assert_allclose(speeds, 1000, rtol=1e-6)
