"""Trains one configuration under every exchange it names, and compares them.

  python -m experiments.train --config=configs/digits.py \
    --json=digits.jsonl --plot=digits.png --workdir=runs/digits

A field of the configuration is set by `--config.field=value`. With
`--workdir` a job that was killed goes on where its last checkpoint is.
"""

import pathlib
from collections.abc import Sequence

import rich.console
from absl import app, flags
from ml_collections import config_flags

from experiments import _exchanges, _report, _rows, _runner, _tasks
from experiments._checkpoint import Workdir
from experiments._progress import Display

_ROOT = pathlib.Path(__file__).parents[1]
_PLAIN_WIDTH = 132  # Columns of the table where there is no terminal.

_CONFIG = config_flags.DEFINE_config_file(
  "config", str(_ROOT / "configs" / "digits.py"), "What to run."
)
_JSON = flags.DEFINE_string("json", None, "Where to write rows (JSON Lines).")
_PLOT = flags.DEFINE_string("plot", None, "Where to write the plot (PNG).")
_WORKDIR = flags.DEFINE_string(
  "workdir", None, "Where to keep checkpoints; the same folder resumes."
)


def main(argv: Sequence[str]) -> None:
  """Runs the job the flags describe."""
  if len(argv) > 1:
    raise app.UsageError(f"Flags must start with --, got {argv[1]!r}.")
  config = _CONFIG.value
  console = rich.console.Console()
  if not console.is_terminal:
    console = rich.console.Console(width=_PLAIN_WIDTH)
  for exchange in config.exchanges:
    _exchanges.get_exchange(exchange)  # A misspelt name fails before any work.
  mesh = _runner.make_mesh(config.workers)
  workdir = Workdir(_WORKDIR.value, config) if _WORKDIR.value else None
  task = _tasks.load_task(config)
  runs = len(config.exchanges) * len(config.seeds)
  with Display(console, steps=config.steps, runs=runs) as display:
    try:
      finished = _runner.run_job(
        config, task, mesh, workdir=workdir, display=display
      )
    except FloatingPointError as error:
      raise SystemExit(f"Stopped: {error}") from error
  rows = _report.summarise(config, task, finished)
  console.print(_report.make_table(rows, task.metric))
  for metric, value, unit in task.facts:
    console.print(f"{metric}: {value} {unit}")
  if _JSON.value:
    _rows.write_rows(_JSON.value, rows)
  if _PLOT.value:
    _report.save_plot(rows, task.metric, _PLOT.value)


if __name__ == "__main__":
  app.run(main)
