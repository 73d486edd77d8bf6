"""How good predictions are: errors, ranks, and the choices they lead to."""

import statistics
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np


class Pair(NamedTuple):
  """A predicted step and a measured one.

  Attributes:
    testbed: where.
    shape: of the step; pairs of one testbed and shape differ in the exchange.
    exchange: name of it.
    held: what the calibration has not seen of it.
    predicted_s: seconds.
    measured_s: seconds.
    noise: of the measurement, relative.
  """

  testbed: str
  shape: str
  exchange: str
  held: str
  predicted_s: float
  measured_s: float
  noise: float

  @property
  def error(self) -> float:
    """Relative; positive if too much was predicted."""
    return self.predicted_s / self.measured_s - 1


class Errors(NamedTuple):
  """Errors of several pairs, relative.

  Attributes:
    pairs: how many.
    mape: mean of the absolute errors.
    bias: mean of the errors.
    worst: largest absolute error.
    rank: Spearman's correlation; NaN of fewer than two pairs.
    noise: median of the measurements'.
  """

  pairs: int
  mape: float
  bias: float
  worst: float
  rank: float
  noise: float


class Decision(NamedTuple):
  """The exchange that was predicted to be the fastest of a shape.

  Attributes:
    testbed: where.
    shape: of the step.
    chosen: the exchange with the least predicted seconds.
    best: that with the least measured ones.
    regret: of the chosen one's measured seconds over the best's, less 1.
    noise: the larger one of their noises.
    compresses: whether choosing `fp32` or another one was right.
  """

  testbed: str
  shape: str
  chosen: str
  best: str
  regret: float
  noise: float
  compresses: bool

  @property
  def right(self) -> bool:
    """Whether the choice is the best, or no worse than the noise."""
    return self.regret <= self.noise


def errors(pairs: Sequence[Pair]) -> Errors:
  """Scores predictions.

  Args:
    pairs: one at least.

  >>> pair = Pair("here", "width 8", "fp32", "exchange", 1.1, 1.0, 0.02)
  >>> found = errors([pair, pair._replace(predicted_s=1.8, measured_s=2.0)])
  >>> tuple(round(x, 3) for x in (found.mape, found.bias, found.rank))
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


def decisions(pairs: Iterable[Pair], baseline: str = "fp32") -> list[Decision]:
  """The choice of an exchange for each shape of each testbed.

  Args:
    pairs: those without exchange are no choice.
    baseline: the exchange that does not compress.
  """
  shapes: dict[tuple[str, str], list[Pair]] = {}
  for pair in pairs:
    if pair.exchange != "none":
      shapes.setdefault((pair.testbed, pair.shape), []).append(pair)
  found = []
  for (testbed, shape), choices in shapes.items():
    chosen = min(choices, key=lambda pair: pair.predicted_s)
    best = min(choices, key=lambda pair: pair.measured_s)
    regret = chosen.measured_s / best.measured_s - 1
    noise = max(chosen.noise, best.noise)
    agree = (chosen.exchange == baseline) == (best.exchange == baseline)
    found.append(
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
  return found
