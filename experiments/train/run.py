"""A training job: from a configuration to a table, rows and a plot."""

from pathlib import Path

import jax
from ml_collections import ConfigDict

from experiments.common import loop, names, records
from experiments.common.checkpoint import CheckpointStore
from experiments.common.console import make_console
from experiments.common.loop import OnStep
from experiments.common.progress import Display, ScalarWriter
from experiments.common.workdir import FREE_FIELDS, Run, Workdir
from experiments.train import cases, rows as train_rows, tasks
from experiments.train.mesh import Mesh, make_mesh
from experiments.train.tasks import Task
from experiments.train.trainer import Trainer, make_score


def run_experiment(
  config: ConfigDict,
  *,
  json: str | None = None,
  plot: str | None = None,
  workdir: str | None = None,
  tensorboard: str | None = None,
  processes: int = 1,
) -> None:
  """Trains all exchanges and seeds, prints the table, writes rows and plot."""
  # Of several processes, only the first prints and writes; checkpoints are the
  # exception.
  names.check_fields(config, "exchanges")
  for exchange in config.exchanges:
    cases.check_exchange(exchange)  # A misspelled name fails before any work.
  mesh = make_mesh(config.workers, processes)
  is_first = jax.process_index() == 0
  console = make_console()
  console.quiet = not is_first
  folder = open_workdir(workdir, config) if workdir else None
  task = tasks.load_task(config)
  runs = len(config.exchanges) * len(config.seeds)
  with Display(console, steps=config.steps, runs=runs) as display:
    try:
      finished = train_all(
        config,
        task,
        mesh,
        workdir=folder,
        tensorboard=tensorboard,
        display=display,
      )
    except FloatingPointError as error:
      raise SystemExit(f"Stopped: {error}") from error
  if not is_first:
    return
  rows = train_rows.make_rows(config, task, finished)
  console.print(train_rows.summary_table(rows).to_console())
  for metric, value, unit in task.facts:
    console.print(f"{metric}: {value} {unit}")
  records.write_rows(json, rows)
  if plot:
    from experiments.train.plot import save_plot  # Imports matplotlib.

    save_plot(rows, plot)


def open_workdir(folder: str, config: ConfigDict) -> Workdir:
  """Opens the work folder of a job, which other workers may continue."""
  return Workdir(folder, config, free_fields=(*FREE_FIELDS, "workers"))


def open_scalars(folder: str | None, name: str) -> ScalarWriter | None:
  """Returns the writer of one run's scalars, if there is a folder for them."""
  if folder is None:
    return None
  path = Path(folder) / name
  return ScalarWriter(path, is_quiet=jax.process_index() != 0)


def train_all(
  config: ConfigDict,
  task: Task,
  mesh: Mesh,
  *,
  workdir: Workdir | None = None,
  tensorboard: str | None = None,
  display: Display | None = None,
) -> list[Run]:
  """Trains every exchange with every seed, but runs that `workdir` has."""
  score = make_score(task)
  trainers = {
    name: Trainer(config, task, mesh, name) for name in config.exchanges
  }

  def run_case(
    exchange: str, seed: int, store: CheckpointStore | None, on_step: OnStep
  ) -> Run:
    trainer = trainers[exchange]
    writer = open_scalars(tensorboard, f"{exchange}-seed{seed}")
    trained = trainer.train_seed(
      seed, store=store, on_step=on_step, writer=writer
    )
    run = trainer.summarize_run(seed, trained, score)
    if writer:
      writer.write(len(trained.log.loss), {"score": run.score})
      writer.close()
    return run

  return loop.run_cases(
    config.exchanges,
    config.seeds,
    run_case,
    lambda run: (run.score, run.step_ms),
    workdir=workdir,
    display=display,
  )
