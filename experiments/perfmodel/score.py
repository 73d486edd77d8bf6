"""Scores of predictions: errors, rank correlation, and resulting choices."""

import statistics
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np


class Pair(NamedTuple):
  """A predicted step and a measured one."""

  testbed: str  # Name of the testbed.
  # Width and batch of the step; pairs of one testbed and shape differ in the
  # exchange.
  shape: str
  exchange: str  # Name of the exchange.
  unseen: str  # Properties of the step that no calibration step has.
  predicted_s: float  # Predicted seconds.
  measured_s: float  # Measured seconds.
  noise: float  # Noise of the measurement, relative.

  @property
  def error(self) -> float:
    """The relative error; positive if the prediction is too long."""
    return self.predicted_s / self.measured_s - 1


class Errors(NamedTuple):
  """Relative errors of several pairs."""

  pairs: int  # Number of pairs.
  mape: float  # Mean of the absolute errors.
  bias: float  # Mean of the errors.
  worst: float  # Largest absolute error.
  rank: float  # Spearman's rank correlation; NaN for fewer than two pairs.
  noise: float  # Median noise of the measurements.


class Decision(NamedTuple):
  """The exchange that is predicted to be the fastest for a shape."""

  testbed: str  # Name of the testbed.
  shape: str  # Width and batch of the step.
  chosen: str  # The exchange with the least predicted seconds.
  best: str  # The exchange with the least measured seconds.
  regret: float  # Measured seconds of `chosen` over those of `best`, less 1.
  noise: float  # The larger noise of the two measurements.
  is_right_to_compress: bool  # Whether choosing `fp32` or a codec was right.

  @property
  def is_right(self) -> bool:
    """Whether the choice is the best one up to the noise."""
    return self.regret <= self.noise


def score_errors(pairs: Sequence[Pair]) -> Errors:
  """Returns the errors of predictions.

  >>> pair = Pair("here", "width 8", "fp32", "exchange", 1.1, 1.0, 0.02)
  >>> other = pair._replace(predicted_s=1.8, measured_s=2.0)
  >>> errors = score_errors([pair, other])
  >>> tuple(round(x, 3) for x in (errors.mape, errors.bias, errors.rank))
  (0.1, 0.0, 1.0)
  """
  each = [pair.error for pair in pairs]
  return Errors(
    len(pairs),
    statistics.fmean(map(abs, each)),
    statistics.fmean(each),
    max(map(abs, each)),
    _rank_correlation(
      [pair.predicted_s for pair in pairs], [pair.measured_s for pair in pairs]
    ),
    statistics.median(pair.noise for pair in pairs),
  )


def _rank_correlation(xs: Sequence[float], ys: Sequence[float]) -> float:
  if len(xs) < 2:
    return float("nan")
  x, y = (np.argsort(np.argsort(values)) for values in (xs, ys))
  n = len(xs)
  return 1 - 6 * float(np.sum((x - y) ** 2)) / (n * (n**2 - 1))


def make_decisions(
  pairs: Iterable[Pair], baseline: str = "fp32"
) -> list[Decision]:
  """Returns the choice of an exchange for each shape of each testbed."""
  shapes: dict[tuple[str, str], list[Pair]] = {}
  for pair in pairs:
    if pair.exchange != "none":
      shapes.setdefault((pair.testbed, pair.shape), []).append(pair)
  decisions = []
  for (testbed, shape), choices in shapes.items():
    chosen = min(choices, key=lambda pair: pair.predicted_s)
    best = min(choices, key=lambda pair: pair.measured_s)
    regret = chosen.measured_s / best.measured_s - 1
    noise = max(chosen.noise, best.noise)
    agree = (chosen.exchange == baseline) == (best.exchange == baseline)
    decisions.append(
      Decision(
        testbed,
        shape,
        chosen.exchange,
        best.exchange,
        regret,
        noise,
        agree or regret <= noise,
      )
    )
  return decisions
