"""Runs the study from a configuration to a table, rows and a plot."""

import pathlib
import sys

import jax
from ml_collections import ConfigDict

from experiments.common import config_fields, records
from experiments.common.console import make_console
from experiments.common.workdir import Workdir
from experiments.study import cases, tables, trainer, trials
from experiments.study.rows import make_rows
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
) -> list[records.Row]:
  """Runs what is missing, prints the table, and writes rows and a plot."""
  config_fields.check_fields(config, "algorithms")
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
      to_line=trainer.StudyRun.to_line,
    )
    cache = str(pathlib.Path(workdir) / "compiled")
    jax.config.update("jax_compilation_cache_dir", cache)
  task = tasks.load_task(config)
  bench = trainer.Bench(config, task, mesh)
  used: dict[
    trainer.Trial, trainer.StudyRun
  ] = {}  # Others had rates that lost since.
  finished = {run.trial: run for run in folder.read_runs()} if folder else {}
  if finished:
    text = f"{workdir} has {len(finished)} finished runs; the others follow."
    print(text, file=sys.stderr)

  def run(trial: trainer.Trial) -> trainer.StudyRun:
    if trial in finished:
      used[trial] = finished[trial]
      return finished[trial]
    done = finished[trial] = used[trial] = bench.run(trial)
    if folder:
      folder.add_run(done)
    if json:
      records.write_rows(json, make_rows(config, task, list(used.values())))
    name = f"{trial.algorithm} seed {trial.seed}, {trial.steps} steps"
    rates = f"rates {trial.rate:.3g} {trial.outer_rate or ''}".rstrip()
    score = "diverged" if done.score is None else f"{done.score:.3f}"
    console.print(f"{name}, {rates}: score {score}, {done.step_ms:.1f} ms")
    return done

  for name in config.algorithms:
    best = trials.choose_rates(config, name, run, higher=task.unit == "%").trial
    # The longest runs come first: they alone make a table.
    for length in sorted(config.lengths, reverse=True):
      for seed in config.seeds:
        run(best._replace(seed=seed, steps=length))
  rows = make_rows(config, task, list(used.values()))
  if json:
    records.write_rows(json, rows)
  console.print(tables.summary_table(rows).to_console())
  if plot:
    from experiments.study.plot import save_plot  # Imports matplotlib.

    save_plot(rows, plot)
  return rows
