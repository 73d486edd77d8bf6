"""One job, from settings to tables, rows and a plot."""

import rich.progress

from experiments.common import records
from experiments.common.console import make_console
from experiments.common.progress import Display
from experiments.hetero import tables, trainer
from experiments.hetero.cases import Settings
from experiments.hetero.gradients import counts_of, examine, predicted_ratio
from experiments.hetero.rows import make_rows, times


def run(
  settings: Settings, *, json: str | None = None, plot: str | None = None
) -> list[records.Row]:
  """Runs the experiment, prints its tables and writes what is asked for.

  Args:
    settings: of the experiment.
    json: where to write rows, if anywhere.
    plot: where to write the plot, if anywhere.
  """
  console = make_console()
  bench = trainer.Bench(settings)
  # Seeds are the outer loop: a slow minute falls on all scenarios alike.
  wanted = [
    (scenario, deal, seed)
    for seed in settings.seeds
    for scenario in settings.scenarios
    for deal in settings.deals
  ]
  runs: list[trainer.Run] = []
  with Display(console, steps=settings.steps, runs=len(wanted)) as display:
    for scenario, deal, seed in wanted:
      name = f"{scenario} {deal}"
      on_step = display.begin_run(name, seed)
      *others, ours = trainer.train(bench, scenario, deal, seed, on_step)
      runs += [*others, ours]
      shown = times(ours, others[0], settings)
      display.end_run(name, seed, ours.score, shown.step_ms)
  with rich.progress.Progress(console=console, transient=True) as progress:
    gradients = {
      deal: examine(bench, deal)
      for deal in progress.track(settings.deals, description="gradients")
    }
  ratio = predicted_ratio(counts_of(bench))
  rows = make_rows(settings, runs, gradients, ratio)
  console.print(tables.training_table(rows))
  console.print(tables.gradient_table(rows))
  if json:
    records.write_rows(json, rows)
  if plot:
    tables.save_plot(rows, plot)
  return rows
