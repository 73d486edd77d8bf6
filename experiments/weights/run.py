"""One job, from a configuration to tables, rows and a plot."""

import functools
from collections.abc import Sequence

import jax
import rich.console
import rich.progress
from ml_collections import ConfigDict

from experiments.common import records
from experiments.common.checkpoint import Workdir
from experiments.common.console import make_console
from experiments.common.progress import Display
from experiments.models import staged
from experiments.weights import (
  model,
  paper,
  predict,
  rows as weights_rows,
  tables,
  trainer,
)
from experiments.weights.cases import get_case
from experiments.weights.profile import BITPACK, Profile, measure


def run(
  config: ConfigDict,
  *,
  link: str = "pcie3_x8",
  json: str | None = None,
  plot: str | None = None,
  workdir: str | None = None,
) -> None:
  """Runs a job, prints its tables and writes what is asked for.

  Args:
    config: made by a `get_config()`.
    link: whose emulated times the tables show.
    json: where to write rows, if anywhere.
    plot: where to write the plot, if anywhere.
    workdir: where to keep checkpoints, if anywhere.
  """
  cases = {name: get_case(name) for name in config.cases}
  console = make_console()
  kept = Workdir(workdir, config, trainer.Run) if workdir else None
  setup = trainer.load(config)
  count = len(config.cases) * len(config.seeds)
  with Display(console, steps=config.steps, runs=count) as display:
    runs = trainer.run_job(setup, workdir=kept, display=display)
  profiles = _take_apart(setup, runs, console)
  rows = make_rows(config, runs, profiles)
  console.print(tables.profile_table(rows, link))
  for system in paper.SYSTEMS:
    console.print(tables.prediction_table(rows, system))
  console.print(tables.error_table(rows, link))
  if json:
    records.write_rows(json, rows)
  if plot:
    bits = {n: case.bits for n, case in cases.items() if case.control}
    tables.save_plot(runs, bits, plot)


def _take_apart(
  setup: trainer.Setup,
  runs: Sequence[trainer.Run],
  console: rich.console.Console,
) -> list[Profile]:
  levels = {run.case: _last_level(run) for run in runs}
  cases = {*setup.config.cases, BITPACK}
  turns = (setup.config.profile_rounds + 1) * len(cases)
  with rich.progress.Progress(console=console, transient=True) as progress:
    task = progress.add_task("profile", total=turns)
    on_round = functools.partial(progress.advance, task)
    return measure(setup, levels, on_round)


def _last_level(run: trainer.Run) -> int:
  """The mean over the groups of the levels at the end, rounded."""
  last = {group: level for _, group, level in run.switches}
  return round(sum(last.values()) / len(last))


def make_rows(
  config: ConfigDict,
  runs: Sequence[trainer.Run],
  profiles: Sequence[Profile],
) -> list[records.Row]:
  """Everything that was found, as rows.

  Args:
    config: of the job.
    runs: one for each case and seed.
    profiles: one for each case.
  """
  on_host = jax.default_backend() == "cpu"
  costs = vgg_a_costs()
  weights = sum(cost.weights for cost in costs)
  shares = predict.shares(
    [cost.weights for cost in costs], [cost.flops for cost in costs]
  )
  found = weights_rows.trained(runs, config.error_threshold)
  for profile in profiles:
    case = found[profile.case]
    case |= weights_rows.profiled(profile, on_host=on_host)
    case |= weights_rows.predicted(case, profile, weights, shares)
    case |= weights_rows.timed_to_error(case, profile, on_host=on_host)
  facts = weights_rows.published(config.model)
  return weights_rows.make_rows(config.experiment, found, facts)


def vgg_a_costs() -> list[model.Cost]:
  """The stages of the paper's VGG-A, by their shapes."""
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
  return model.costs(model.abstract(make), pixels)
