"""Compiles, predicts and measures networks, and searches what fits a device."""

import os
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import rich.progress

from experiments.common import records
from experiments.common.console import make_console
from experiments.common.records import Row
from experiments.residuals import budgets, limits, rows as residuals_rows
from experiments.residuals.networks import NetworkSpec
from experiments.residuals.points import Point, measure_point
from experiments.residuals.tables import comparison_table, point_table


class Question(NamedTuple):
  """Networks, modes, limits and budgets of one job.

  Attributes:
    networks: networks and batches that run in every mode.
    modes: names of modes, keys of `MODES`.
    fit_modes: modes whose deepest network and largest batches are searched.
    batch_of: names of networks whose largest batch is searched.
    limit_gb: memory of the device that they must fit, 10^9 bytes.
    budget_of: networks and batches that are planned under budgets.
    budget_shares: budgets, relative to the device memory of plain training.
  """

  networks: Sequence[NetworkSpec]
  modes: Sequence[str]
  fit_modes: Sequence[str]
  batch_of: Sequence[str]
  limit_gb: float
  budget_of: Sequence[NetworkSpec]
  budget_shares: Sequence[float]


def run_experiment(
  question: Question,
  target: str,
  *,
  json: str | None = None,
  plot: str | None = None,
) -> None:
  """Runs a job, prints its tables, and writes rows and a plot.

  Rows are written after every measurement, because a whole job takes hours.

  Args:
    question: networks, modes, limits and budgets.
    target: device to compile for, a key of `TARGETS`.
    json: file to write rows to, if any.
    plot: file to write the plot to, if any.
  """
  console = make_console()
  found = measure_networks(
    question.networks,
    question.modes,
    target,
    residuals_rows.EXPERIMENT,
    json,
  )
  console.print(point_table(found).to_console())
  means = residuals_rows.make_mean_rows(found)
  rows = [*residuals_rows.make_paper_rows(), *found, *means]
  for row in _answer_limits(question, target):
    rows.append(row)
    if json:
      records.write_rows(json, rows)
  for spec in question.budget_of:
    for plan in budgets.fit_budgets(spec, question.budget_shares, target):
      rows += residuals_rows.make_budget_rows(plan)
      if json:
        records.write_rows(json, rows)
  console.print(comparison_table(rows).to_console())
  if json:
    records.write_rows(json, rows)
  if plot:
    from experiments.residuals.plot import save_plot  # Imports matplotlib.

    save_plot(rows, plot)


def measure_networks(
  specs: Sequence[NetworkSpec],
  modes: Sequence[str],
  target: str,
  experiment: str,
  path: str | os.PathLike[str] | None = None,
  memory_gib: float | None = None,
) -> list[Row]:
  """Returns the rows of every network in every mode.

  Args:
    specs: networks and batches.
    modes: names of modes, keys of `MODES`.
    target: device to compile for, a key of `TARGETS`.
    experiment: name of the experiment in the rows.
    path: file that rows are written to after every measurement, if any.
    memory_gib: device memory that the compiler is told of, GiB; None for the
      memory that the GPU has.
  """
  points: list[Point] = []
  found: list[Row] = []
  pairs = [(spec, mode) for spec in specs for mode in modes]
  for spec, mode in rich.progress.track(
    pairs, "compile", console=make_console()
  ):
    points.append(measure_point(spec, mode, target, memory_gib))
    found = list(residuals_rows.make_point_rows(experiment, points, target))
    if path:
      records.write_rows(path, found)
  return found


def _answer_limits(question: Question, target: str) -> Iterator[Row]:
  """Yields rows of the deepest ResNet and the largest batches that fit."""
  limit_bytes = question.limit_gb * 1e9
  for mode in question.fit_modes:
    case = f"{question.limit_gb:g}GB/{mode}"
    found = limits.find_deepest(mode, target, limit_bytes)
    yield from residuals_rows.make_fit_rows(
      f"resnet_batch16/{case}", "deepest", found, target
    )
    for name in question.batch_of:
      found = limits.find_largest_batch(
        NetworkSpec(name, 1), mode, target, limit_bytes
      )
      yield from residuals_rows.make_fit_rows(
        f"{name}/{case}", "largest_batch", found, target
      )
