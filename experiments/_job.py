"""One job, from a configuration to a table, rows and a plot."""

import jax
from ml_collections import ConfigDict

from experiments import _exchanges, _report, _rows, _runner, _tasks
from experiments._checkpoint import Workdir
from experiments._console import make_console
from experiments._progress import Display


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
    _exchanges.get_exchange(exchange)  # A misspelt name fails before any work.
  mesh = _runner.make_mesh(config.workers, processes)
  first = jax.process_index() == 0
  console = make_console()
  console.quiet = not first
  kept = Workdir(workdir, config) if workdir else None
  task = _tasks.load_task(config)
  runs = len(config.exchanges) * len(config.seeds)
  with Display(console, steps=config.steps, runs=runs) as display:
    try:
      finished = _runner.run_job(
        config, task, mesh, workdir=kept, display=display
      )
    except FloatingPointError as error:
      raise SystemExit(f"Stopped: {error}") from error
  if not first:
    return
  rows = _report.summarise(config, task, finished)
  console.print(_report.make_table(rows, task.metric))
  for metric, value, unit in task.facts:
    console.print(f"{metric}: {value} {unit}")
  if json:
    _rows.write_rows(json, rows)
  if plot:
    _report.save_plot(rows, task.metric, plot)
