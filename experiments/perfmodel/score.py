"""Scores of predictions: errors, rank correlation, and resulting choices."""

import statistics
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np


class Pair(NamedTuple):
  """A predicted step and a measured one.

  Attributes:
    testbed: name of the testbed.
    shape: width and batch of the step; pairs of one testbed and shape differ in
      the exchange.
    exchange: name of the exchange.
    unseen: properties of the step that no calibration step has.
    predicted_s: predicted seconds.
    measured_s: measured seconds.
    noise: noise of the measurement, relative.
  """

  testbed: str
  shape: str
  exchange: str
  unseen: str
  predicted_s: float
  measured_s: float
  noise: float

  @property
  def error(self) -> float:
    """The relative error; positive if the prediction is too long."""
    return self.predicted_s / self.measured_s - 1


class Errors(NamedTuple):
  """Relative errors of several pairs.

  Attributes:
    pairs: number of pairs.
    mape: mean of the absolute errors.
    bias: mean of the errors.
    worst: largest absolute error.
    rank: Spearman's rank correlation; NaN for fewer than two pairs.
    noise: median noise of the measurements.
  """

  pairs: int
  mape: float
  bias: float
  worst: float
  rank: float
  noise: float


class Decision(NamedTuple):
  """The exchange that is predicted to be the fastest for a shape.

  Attributes:
    testbed: name of the testbed.
    shape: width and batch of the step.
    chosen: the exchange with the least predicted seconds.
    best: the exchange with the least measured seconds.
    regret: measured seconds of `chosen` over those of `best`, less 1.
    noise: the larger noise of the two measurements.
    is_right_to_compress: whether choosing `fp32` or a codec was right.
  """

  testbed: str
  shape: str
  chosen: str
  best: str
  regret: float
  noise: float
  is_right_to_compress: bool

  @property
  def is_right(self) -> bool:
    """Whether the choice is the best one up to the noise."""
    return self.regret <= self.noise


def score_errors(pairs: Sequence[Pair]) -> Errors:
  """Returns the errors of predictions.

  Args:
    pairs: at least one pair.

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
