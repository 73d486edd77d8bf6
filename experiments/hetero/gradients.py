"""How far the two means of gradients are from the gradient of all images."""

from typing import Any, NamedTuple

import jax
import numpy as np

from experiments.hetero.cases import SCENARIOS, WORKERS
from experiments.hetero.trainer import Bench
from jaxmotion import hetero


class Gradients(NamedTuple):
  """Moments of an estimate of the full gradient, relative to its norm.

  Attributes:
    bias: norm of the mean estimate's error.
    bias_noise: what the norm would be for an unbiased estimate, from the
      variance over the number of draws.
    variance: mean squared distance of an estimate from the mean estimate.
  """

  bias: float
  bias_noise: float
  variance: float


def predicted_ratio(counts: tuple[int, ...]) -> float:
  """Variance of the plain mean over that of the weighted, for shuffled data.

  Args:
    counts: of each worker.
  """
  n = np.array(counts, float)
  return float(n.sum() * np.mean(1 / n) / len(n))


def counts_of(bench: Bench) -> tuple[int, ...]:
  """The shares that are examined: those of one worker 4 times as slow."""
  speeds = 1 / np.array(SCENARIOS["one_4x"][0])
  return hetero.integer_shares(bench.settings.total, speeds.tolist())


def examine(bench: Bench, deal: str) -> dict[str, Gradients]:
  """Draws many batches at the initial parameters, without any slowdown.

  Args:
    bench: what runs have in common.
    deal: name of the way to deal the data.
  """
  dealer, counts = bench.dealers[deal], counts_of(bench)
  params = bench.params(0)
  state = bench.uneven.init(params)
  gradient = jax.grad(bench.mean_loss)(params, dealer.images)
  exact = _rows(jax.tree.map(lambda a: a[None], gradient))[0]
  weighted, plain = [], []
  for step in range(bench.settings.draws):
    batch = dealer.deal(counts, (1,) * WORKERS, 0, step)
    sums = bench.uneven.work(state, batch, counts).value
    of_workers, count = _rows(sums.grads), np.asarray(sums.count)
    weighted.append(of_workers.sum(axis=0) / count.sum())
    plain.append((of_workers / count[:, None]).mean(axis=0))
  return {
    "weighted": _moments(np.stack(weighted), exact),
    "plain_mean": _moments(np.stack(plain), exact),
  }


def _rows(tree: Any) -> np.ndarray:
  """All leaves in one row for each worker, along their leading axis."""
  leaves = [np.asarray(a, np.float64) for a in jax.tree.leaves(tree)]
  return np.concatenate([a.reshape(len(a), -1) for a in leaves], axis=1)


def _moments(estimates: np.ndarray, exact: np.ndarray) -> Gradients:
  scale = np.linalg.norm(exact)
  mean = estimates.mean(axis=0)
  variance = ((estimates - mean) ** 2).sum(axis=1).mean() / scale**2
  return Gradients(
    float(np.linalg.norm(mean - exact) / scale),
    float(np.sqrt(variance / len(estimates))),
    float(variance),
  )
