"""Rows of calibrations, of validated predictions and of the scaling study."""

import statistics
from collections.abc import Sequence

import jax

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
  stamp = (records.describe_machine(), jax.__version__)
  rows = []
  for pair in pairs:
    rows.append(
      records.Row(
        f"{_VALIDATE}_{pair.testbed}",
        f"{pair.exchange} {pair.shape}",
        "predicted_step_ms",
        1e3 * pair.predicted_s,
        "ms",
        1e3 * pair.measured_s,
        pair.predicted_s / pair.measured_s,
        1e3 * pair.measured_s * pair.noise,
        *stamp,
      )
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
    rows += [
      records.Row(
        f"{_VALIDATE}_{testbed}",
        case,
        metric,
        value,
        "1",
        None,
        None,
        found.noise,
        *stamp,
      )
      for metric, value in scores.items()
    ]
  for testbed, choices in _group_decisions(decisions).items():
    rows += [
      records.Row(
        f"{_VALIDATE}_{testbed}",
        _ALL,
        m,
        v,
        "1",
        None,
        None,
        None,
        *stamp,
      )
      for m, v in score_decisions(choices).items()
    ]
  return rows


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
    records.Row(
      "perfmodel_calibrate",
      f"{name} at {size:.6g}",
      "seconds",
      seconds,
      "s",
      None,
      None,
      curve.noise * seconds,
      platform.name,
      jax.__version__,
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
  rows = []
  for point in points:
    step_ms, plain = 1e3 * point.step.total_s, base.get(point[:3])
    rows.append(
      records.Row(
        f"perfmodel_scaling_{point.network}",
        f"{point.strategy} {point.axis}={point.value:g}",
        "predicted_step_ms",
        step_ms,
        "ms",
        plain,
        step_ms / plain if plain else None,
        None,
        "predicted, ethernet_10gbit",
        jax.__version__,
      )
    )
  return rows
