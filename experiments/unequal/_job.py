"""One job, from settings to tables, rows and a plot."""

import rich.progress

from experiments import _rows
from experiments._console import make_console
from experiments._progress import Display
from experiments.unequal import _findings, _gradients, _tables, _train
from experiments.unequal._settings import Settings


def run(
  settings: Settings, *, json: str | None = None, plot: str | None = None
) -> list[_rows.Row]:
  """Runs the experiment, prints its tables and writes what is asked for.

  Args:
    settings: of the experiment.
    json: where to write rows, if anywhere.
    plot: where to write the plot, if anywhere.
  """
  console = make_console()
  bench = _train.Bench(settings)
  # Seeds are the outer loop: a slow minute falls on all scenarios alike.
  wanted = [
    (scenario, deal, seed)
    for seed in settings.seeds
    for scenario in settings.scenarios
    for deal in settings.deals
  ]
  runs: list[_train.Run] = []
  with Display(console, steps=settings.steps, runs=len(wanted)) as display:
    for scenario, deal, seed in wanted:
      name = f"{scenario} {deal}"
      on_step = display.begin(name, seed)
      *others, ours = _train.train(bench, scenario, deal, seed, on_step)
      runs += [*others, ours]
      shown = _findings.times(ours, others[0], settings)
      display.end(name, seed, ours.score, shown.step_ms)
  with rich.progress.Progress(console=console, transient=True) as progress:
    gradients = {
      deal: _gradients.examine(bench, deal)
      for deal in progress.track(settings.deals, description="gradients")
    }
  ratio = _gradients.predicted_ratio(_gradients.counts_of(bench))
  rows = _findings.make_rows(settings, runs, gradients, ratio)
  console.print(_tables.training_table(rows))
  console.print(_tables.gradient_table(rows))
  if json:
    _rows.write_rows(json, rows)
  if plot:
    _tables.save_plot(rows, plot)
  return rows
