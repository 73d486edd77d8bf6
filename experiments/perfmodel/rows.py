"""Rows of calibrations, of validated predictions and of the scaling study."""

import statistics
from collections.abc import Sequence

from experiments.common import records
from experiments.perfmodel import measured, score, sweep
from jaxmotion import perfmodel

_ALL = "all"
_VALIDATE = "perfmodel_validate"


def group_pairs(pairs: Sequence[score.Pair]) -> dict[str, list[score.Pair]]:
  """Returns pairs by testbed, then by testbed and unseen properties."""
  found: dict[str, list[score.Pair]] = {}
  for pair in pairs:
    found.setdefault(f"{pair.testbed} {_ALL}", []).append(pair)
  for pair in pairs:
    found.setdefault(f"{pair.testbed} held out: {pair.unseen}", []).append(pair)
  return dict(sorted(found.items()))


def validation_rows(
  pairs: Sequence[score.Pair], decisions: Sequence[score.Decision]
) -> list[records.Row]:
  """Returns a row for each predicted step, then rows of the scores."""
  rows = []
  for pair in pairs:
    key = f"{_VALIDATE}_{pair.testbed}", f"{pair.exchange} {pair.shape}"
    measured_ms = 1e3 * pair.measured_s
    predicted = records.Measured(
      1e3 * pair.predicted_s, "ms", measured_ms * pair.noise
    )
    rows.append(
      records.make_row(*key, "predicted_step_ms", predicted, measured_ms)
    )
  for name, members in group_pairs(pairs).items():
    testbed, _, case = name.partition(" ")
    found = score.score_errors(members)
    scores = {
      "mape": found.mape,
      "bias": found.bias,
      "max_error": found.worst,
      "rank_correlation": found.rank,
    }
    cases = {case: _list_scores(scores, found.noise)}
    rows += records.make_rows(f"{_VALIDATE}_{testbed}", cases)
  for testbed, choices in _group_decisions(decisions).items():
    cases = {_ALL: _list_scores(score_decisions(choices))}
    rows += records.make_rows(f"{_VALIDATE}_{testbed}", cases)
  return rows


def _list_scores(
  scores: dict[str, float], noise: float | None = None
) -> records.Metrics:
  return {k: records.Measured(v, "1", noise) for k, v in scores.items()}


def _group_decisions(
  decisions: Sequence[score.Decision],
) -> dict[str, list[score.Decision]]:
  found: dict[str, list[score.Decision]] = {_ALL: list(decisions)}
  for decision in decisions:
    found.setdefault(decision.testbed, []).append(decision)
  return found


def score_decisions(decisions: Sequence[score.Decision]) -> dict[str, float]:
  """Returns shares of right choices, and the mean cost of all choices."""
  return {
    "decision_accuracy": statistics.fmean(d.is_right for d in decisions),
    "decision_accuracy_strict": statistics.fmean(
      d.chosen == d.best for d in decisions
    ),
    "compress_or_not_accuracy": statistics.fmean(
      d.is_right_to_compress for d in decisions
    ),
    "regret": statistics.fmean(d.regret for d in decisions),
    "decisions": len(decisions),
  }


def calibration_rows(platform: perfmodel.Platform) -> list[records.Row]:
  """Returns a row for each size of each curve."""
  return [
    records.make_row(
      *("perfmodel_calibrate", f"{name} at {size:.6g}", "seconds"),
      records.Measured(seconds, "s", curve.noise * seconds),
      machine=platform.name,
    )
    for name, curve in measured.platform_curves(platform).items()
    for size, seconds in zip(curve.sizes, curve.seconds, strict=True)
  ]


def scaling_rows(points: Sequence[sweep.Point]) -> list[records.Row]:
  """Returns a row for each step; its baseline is `data` at the same value."""
  base = {
    point[:3]: 1e3 * point.step.total_s
    for point in points
    if point.strategy == sweep.BASELINE
  }
  return [
    records.make_row(
      f"perfmodel_scaling_{point.network}",
      f"{point.strategy} {point.axis}={point.value:g}",
      "predicted_step_ms",
      records.Measured(1e3 * point.step.total_s, "ms"),
      base.get(point[:3]),
      machine="predicted, ethernet_10gbit",
    )
    for point in points
  ]
