"""One job, from a configuration to a table, rows and a plot."""

import jax
from ml_collections import ConfigDict

from experiments.common import records
from experiments.common.checkpoint import Workdir
from experiments.common.console import make_console
from experiments.common.progress import Display
from experiments.train import exchanges, report, runner, tasks


def run(
  config: ConfigDict,
  *,
  json: str | None = None,
  plot: str | None = None,
  workdir: str | None = None,
  processes: int = 1,
) -> None:
  """Runs a job, prints its table and writes what is asked for.

  Of several processes only the first prints and writes; checkpoints are the
  exception.

  Args:
    config: made by a `get_config()`.
    json: where to write rows, if anywhere.
    plot: where to write the plot, if anywhere.
    workdir: where to keep checkpoints, if anywhere.
    processes: how many run this job together.

  Raises:
    SystemExit: if a loss is not finite; its message says which.
  """
  for exchange in config.exchanges:
    exchanges.get_exchange(exchange)  # A misspelt name fails before any work.
  mesh = runner.make_mesh(config.workers, processes)
  first = jax.process_index() == 0
  console = make_console()
  console.quiet = not first
  kept = Workdir(workdir, config) if workdir else None
  task = tasks.load_task(config)
  runs = len(config.exchanges) * len(config.seeds)
  with Display(console, steps=config.steps, runs=runs) as display:
    try:
      finished = runner.run_job(
        config, task, mesh, workdir=kept, display=display
      )
    except FloatingPointError as error:
      raise SystemExit(f"Stopped: {error}") from error
  if not first:
    return
  rows = report.summarise(config, task, finished)
  console.print(report.make_table(rows, task.metric))
  for metric, value, unit in task.facts:
    console.print(f"{metric}: {value} {unit}")
  if json:
    records.write_rows(json, rows)
  if plot:
    report.save_plot(rows, task.metric, plot)
