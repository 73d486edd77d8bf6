"""Compiles, predicts and measures networks, and searches what fits a device."""

import functools
import os
from collections.abc import Callable, Iterable, Sequence

import rich.progress

from experiments.common import records
from experiments.common.console import make_console
from experiments.residuals import limits, rows as residuals_rows
from experiments.residuals.measure import measure_point
from experiments.residuals.networks import NetworkSpec

Path = str | os.PathLike[str]


class Job:
  """Rows of one job, some of them measured before."""

  # Rows are written after every measurement, because a whole job takes hours.
  # Rows in the file that hold still are not measured again, and rows of what
  # was not asked for stay.

  def __init__(self, target: str, path: Path | None, fresh: bool):
    self._target, self._path, self._fresh = target, path, fresh
    self._kept = records.read_cases(path)

  def measure_networks(
    self, specs: Sequence[NetworkSpec], modes: Sequence[str]
  ) -> None:
    """Measures every network in every mode."""
    for spec, mode in _track((s, m) for s in specs for m in modes):
      if not self._has([f"{spec.case}/{mode}"], mode):
        point = measure_point(spec, mode, self._target)
        self._add(residuals_rows.make_point_rows(point, self._target), mode)

  def find_limits(
    self, modes: Sequence[str], batch_of: Sequence[str], limit_gb: float
  ) -> None:
    """Searches the deepest ResNet and the largest batches that fit."""
    # `batch_of`: names of the networks whose largest batches are searched.
    limit_bytes = limit_gb * 1e9
    for mode in modes:
      limit = f"{limit_gb:g}GB/{mode}"
      found = functools.partial(
        limits.find_deepest, mode, self._target, limit_bytes
      )
      self._find_size(f"resnet_batch16/{limit}", "deepest", found, mode)
      for name in batch_of:
        spec = NetworkSpec(name, 1)
        found = functools.partial(
          limits.find_largest_batch, spec, mode, self._target, limit_bytes
        )
        self._find_size(f"{name}/{limit}", "largest_batch", found, mode)

  def _find_size(
    self,
    case: str,
    metric: str,
    find_size: Callable[[], limits.FittingSize | None],
    mode: str,
  ) -> None:
    """Adds the rows of a size that fits, searched unless they hold still."""
    if not self._has([case], mode):
      rows = residuals_rows.make_fit_rows(
        case, metric, find_size(), self._target
      )
      self._add(rows, mode)

  def fit_budgets(self, spec: NetworkSpec, shares: Sequence[float]) -> None:
    """Plans a network under budgets."""
    cases = [residuals_rows.name_budget(spec, share) for share in shares]
    if not self._has(cases, None):
      for plan in limits.fit_budgets(spec, shares, self._target):
        self._add(residuals_rows.make_budget_rows(plan), None)

  def list_rows(self) -> list[records.Row]:
    """Returns all rows, those of the file that were not asked for, too."""
    points = self.list_points()
    means = residuals_rows.make_mean_rows(points)
    others = [
      row
      for rows in self._kept.values()
      if not (
        residuals_rows.is_of_point(rows) or residuals_rows.is_summary(rows)
      )
      for row in rows
    ]
    return [*residuals_rows.make_paper_rows(), *points, *means, *others]

  def list_points(self) -> list[records.Row]:
    """Returns the rows of networks in modes, with ratios to plain."""
    return residuals_rows.add_plain_ratios(
      row
      for rows in self._kept.values()
      if residuals_rows.is_of_point(rows)
      for row in rows
    )

  def _has(self, cases: Sequence[str], mode: str | None) -> bool:
    """Says whether the rows of cases need not be measured again."""
    return not self._fresh and all(
      residuals_rows.are_current(self._kept.get(case, []), mode)
      for case in cases
    )

  def _add(self, rows: Iterable[records.Row], mode: str | None) -> None:
    added = dict[str, list[records.Row]]()
    for row in residuals_rows.stamp_rows(rows, mode):
      added.setdefault(row.case, []).append(row)
    self._kept |= added
    records.write_rows(self._path, self.list_rows())


def _track(
  pairs: Iterable[tuple[NetworkSpec, str]],
) -> Iterable[tuple[NetworkSpec, str]]:
  return rich.progress.track(list(pairs), "compile", console=make_console())
