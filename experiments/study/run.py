"""Runs the study: rates by trials, then a table, rows and a plot."""

import sys
from collections.abc import Callable
from pathlib import Path

import jax
from ml_collections import ConfigDict

from experiments.common import names, records
from experiments.common.console import make_console
from experiments.common.records import Row
from experiments.common.workdir import Workdir
from experiments.study import cases, rows as study_rows, trainer
from experiments.study.trainer import StudyRun, Trial
from experiments.train import tasks
from experiments.train.mesh import make_mesh

# Fields that may change between two starts: they only add runs.
_FREE_FIELDS = ("algorithms", "lengths", "seeds")


def run_experiment(
  config: ConfigDict,
  *,
  json: str | None = None,
  plot: str | None = None,
  workdir: str | None = None,
) -> list[Row]:
  """Runs what is missing, prints the table, and writes rows and a plot."""
  names.check_fields(config, "algorithms")
  for name in config.algorithms:
    cases.check_algorithm(name)  # A misspelled name fails before any work.
  mesh = make_mesh(config.workers)
  console = make_console()
  folder = None
  if workdir:
    folder = Workdir(
      workdir,
      config,
      trainer.run_from_line,
      _FREE_FIELDS,
      to_line=StudyRun.to_line,
    )
    cache = str(Path(workdir) / "compiled")
    jax.config.update("jax_compilation_cache_dir", cache)
  task = tasks.load_task(config)
  bench = trainer.Bench(config, task, mesh)
  used: dict[Trial, StudyRun] = {}  # Others had rates that lost since.
  finished = {run.trial: run for run in folder.read_runs()} if folder else {}
  if finished:
    text = f"{workdir} has {len(finished)} finished runs; the others follow."
    print(text, file=sys.stderr)

  def run(trial: Trial) -> StudyRun:
    if trial in finished:
      used[trial] = finished[trial]
      return finished[trial]
    done = finished[trial] = used[trial] = bench.run(trial)
    if folder:
      folder.add_run(done)
    rows = study_rows.make_rows(config, task, list(used.values()))
    records.write_rows(json, rows)
    name = f"{trial.algorithm} seed {trial.seed}, {trial.steps} steps"
    rates = f"rates {trial.rate:.3g} {trial.outer_rate or ''}".rstrip()
    score = "diverged" if done.score is None else f"{done.score:.3f}"
    console.print(f"{name}, {rates}: score {score}, {done.step_ms:.1f} ms")
    return done

  for name in config.algorithms:
    best = choose_rates(config, name, run, higher=task.unit == "%").trial
    # The longest runs come first: they alone make a table.
    for length in sorted(config.lengths, reverse=True):
      for seed in config.seeds:
        run(best._replace(seed=seed, steps=length))
  rows = study_rows.make_rows(config, task, list(used.values()))
  records.write_rows(json, rows)
  console.print(study_rows.summary_table(rows).to_console())
  if plot:
    from experiments.study.plot import save_plot  # Imports matplotlib.

    save_plot(rows, plot)
  return rows


def choose_rates(
  config: ConfigDict,
  name: str,
  run: Callable[[Trial], StudyRun],
  *,
  higher: bool,
) -> StudyRun:
  """Returns the best of an algorithm's trials."""
  # Three learning rates are tried, then both neighbors of the best of them:
  # other outer learning rates for local updates, rates in between for all
  # others. As long as the best is the least or the greatest that was tried, the
  # next one beyond it is tried, at most `config.further` times.
  algorithm = cases.ALGORITHMS[name]
  base = config.base_rates[algorithm.optimizer or config.optimizer]
  is_local = algorithm.outer_rate is not None

  def try_rates(rate: float, outer_rate: float | None) -> StudyRun:
    seed, steps = config.trial_seed, config.trial_steps
    return run(Trial(name, seed, steps, rate, outer_rate))

  def rank(found: StudyRun) -> tuple[float, float]:
    if found.score is None or found.loss is None:
      return float("inf"), float("inf")
    # Scores of few examples are often equal: then the training loss decides.
    return (-found.score if higher else found.score), found.loss

  def knob(found: StudyRun) -> float:
    trial = found.trial
    return trial.rate if trial.outer_rate is None else trial.outer_rate

  def scale(found: StudyRun, factor: float) -> StudyRun:
    _, _, _, rate, outer_rate = found.trial
    if outer_rate is None:
      return try_rates(rate * factor, None)
    return try_rates(rate, outer_rate * factor)

  tried = [
    try_rates(base * factor, algorithm.outer_rate)
    for factor in (1.0, 1 / config.coarse, config.coarse)
  ]
  best = min(tried, key=rank)
  tried = [best] if is_local else tried
  tried += [scale(best, 1 / config.fine), scale(best, config.fine)]
  for _ in range(config.further):
    best = min(tried, key=rank)
    if knob(best) == min(map(knob, tried)):
      tried.append(scale(best, 1 / config.fine))
    elif knob(best) == max(map(knob, tried)):
      tried.append(scale(best, config.fine))
  return min(tried, key=rank)
