"""Runs an experiment from its settings to tables, rows and a plot."""

import rich.progress

from experiments.common import records
from experiments.common.console import make_console
from experiments.common.progress import Display
from experiments.common.records import Row
from experiments.hetero import rows as hetero_rows, trainer
from experiments.hetero.cases import Settings
from experiments.hetero.gradients import (
  examine_means,
  examined_counts,
  predict_variance_ratio,
)
from experiments.hetero.trainer import Bench, Run


def run_experiment(
  settings: Settings, *, json: str | None = None, plot: str | None = None
) -> list[Row]:
  """Trains all cases, prints tables, and writes rows and a plot."""
  console = make_console()
  bench = Bench(settings)
  # Seeds are the outer loop: a slow minute falls on all scenarios alike.
  wanted = [
    (scenario, deal, seed)
    for seed in settings.seeds
    for scenario in settings.scenarios
    for deal in settings.deals
  ]
  runs: list[Run] = []
  with Display(console, steps=settings.steps, runs=len(wanted)) as display:
    for scenario, deal, seed in wanted:
      name = f"{scenario} {deal}"
      on_step = display.begin_run(name, seed)
      *others, ours = trainer.train_cases(bench, scenario, deal, seed, on_step)
      runs += [*others, ours]
      shown = hetero_rows.summarize_times(ours, others[0], settings)
      display.end_run(name, seed, ours.score, shown.step_ms)
  with rich.progress.Progress(console=console, transient=True) as progress:
    gradients = {
      deal: examine_means(bench, deal)
      for deal in progress.track(settings.deals, description="gradients")
    }
  ratio = predict_variance_ratio(examined_counts(bench))
  rows = hetero_rows.make_rows(settings, runs, gradients, ratio)
  console.print(hetero_rows.summary_table(rows).to_console())
  console.print(hetero_rows.gradient_table(rows).to_console())
  records.write_rows(json, rows)
  if plot:
    from experiments.hetero.plot import save_plot  # Imports matplotlib.

    save_plot(rows, plot)
  return rows
