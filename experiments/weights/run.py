"""A job: from a configuration to tables, rows and a plot."""

import functools
from collections.abc import Sequence

import jax
import rich.console
import rich.progress
from ml_collections import ConfigDict

from experiments.common import checkpoint, loop, names, records
from experiments.common.console import make_console
from experiments.common.progress import Display
from experiments.common.workdir import Workdir
from experiments.models import staged
from experiments.weights import (
  model,
  paper,
  plot as weights_plot,
  predict,
  profile,
  rows as weights_rows,
)
from experiments.weights.cases import get_case
from experiments.weights.context import RunContext, load_context
from experiments.weights.trainer import Run, Trainer


def run_experiment(
  config: ConfigDict,
  *,
  link: str = "pcie3_x8",
  json: str | None = None,
  plot: str | None = None,
  workdir: str | None = None,
) -> None:
  """Trains all cases and seeds, prints the tables, writes rows and plot."""
  names.check_fields(config, "cases")
  cases = {name: get_case(name) for name in config.cases}
  console = make_console()
  folder = Workdir(workdir, config, Run) if workdir else None
  context = load_context(config)
  count = len(config.cases) * len(config.seeds)
  with Display(console, steps=config.steps, runs=count) as display:
    runs = train_all(context, workdir=folder, display=display)
  profiles = _profile_cases(context, runs, console)
  rows = collect_rows(config, runs, profiles)
  console.print(weights_rows.profile_table(rows, link).to_console())
  for system in paper.SYSTEMS:
    console.print(weights_rows.prediction_table(rows, system).to_console())
  console.print(weights_rows.error_table(rows, link).to_console())
  records.write_rows(json, rows)
  if plot:
    bits = {n: case.bits for n, case in cases.items() if case.control}
    weights_plot.save_plot(runs, bits, plot)


def train_all(
  context: RunContext,
  *,
  workdir: Workdir | None = None,
  display: Display | None = None,
) -> list[Run]:
  """Trains every case with every seed, except runs `workdir` already has."""
  config = context.config
  trainers = {case: Trainer(context, case) for case in config.cases}

  def run_case(
    case: str,
    seed: int,
    store: checkpoint.CheckpointStore | None,
    on_step: loop.OnStep,
  ) -> Run:
    trainer = trainers[case]
    state, log = trainer.train_seed(seed, store=store, on_step=on_step)
    return trainer.summarize_run(seed, state, log)

  return loop.run_cases(
    config.cases,
    config.seeds,
    run_case,
    lambda run: (100 - run.error, run.step_ms),
    workdir=workdir,
    display=display,
  )


def collect_rows(
  config: ConfigDict, runs: Sequence[Run], profiles: Sequence[profile.Profile]
) -> list[records.Row]:
  """Returns the rows of a job, with the paper's and the predicted ones."""
  on_host = jax.default_backend() == "cpu"
  costs = vgg_a_costs()
  weights = sum(cost.weights for cost in costs)
  shares = predict.stage_shares(
    [cost.weights for cost in costs], [cost.flops for cost in costs]
  )
  cases = weights_rows.summarize_cases(
    runs, profiles, config.error_threshold, weights, shares, on_host=on_host
  )
  return weights_rows.make_rows(config.experiment, cases, config.model)


def vgg_a_costs() -> list[model.StageCost]:
  """Returns the cost of each stage of the paper's VGG-A, from its shapes."""
  make = functools.partial(
    staged.build_stages,
    "vgg_a",
    size=224,
    channels=3,
    classes=201,
    width=1.0,
    seed=0,
  )
  pixels = jax.ShapeDtypeStruct((1, 224, 224, 3), "float32")
  return model.stage_costs(model.abstract_model(make), pixels)


def _profile_cases(
  context: RunContext, runs: Sequence[Run], console: rich.console.Console
) -> list[profile.Profile]:
  levels = {run.case: _final_level(run) for run in runs}
  cases = {*context.config.cases, profile.BITPACK}
  steps = (context.config.profile_rounds + 1) * len(cases)
  with rich.progress.Progress(console=console, transient=True) as progress:
    task = progress.add_task("profile", total=steps)
    on_round = functools.partial(progress.advance, task)
    return profile.profile_steps(context, levels, on_round)


def _final_level(run: Run) -> int:
  """Returns the mean over the groups of the levels at the end, rounded."""
  last = {group: level for _, group, level in run.switches}
  return round(sum(last.values()) / len(last))
