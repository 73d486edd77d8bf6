"""Bias and variance of the two ways to average the workers' gradients."""

from typing import Any, NamedTuple

import jax
import numpy as np

from experiments.hetero import cases
from experiments.hetero.trainer import Bench
from jaxmotion import hetero


class Gradients(NamedTuple):
  """Moments of an estimate of the full gradient, relative to its norm."""

  bias: float  # Norm of the mean estimate's error.
  # Expected norm for an unbiased estimate, from the variance over the number of
  # draws.
  bias_noise: float
  # Mean squared distance of an estimate from the mean estimate.
  variance: float


def predict_variance_ratio(counts: tuple[int, ...]) -> float:
  """Predicts the plain mean's variance over the weighted mean's."""
  n = np.array(counts, float)
  return float(n.sum() * np.mean(1 / n) / len(n))


def examined_counts(bench: Bench) -> tuple[int, ...]:
  """Returns the shares that are examined: one worker is 4 times as slow."""
  speeds = 1 / np.array(cases.SCENARIOS["one_4x"][0])
  return hetero.integer_shares(bench.settings.total, speeds.tolist())


def examine_means(bench: Bench, deal: str) -> dict[str, Gradients]:
  """Returns the moments of both means over batches at initial parameters."""
  dealer, counts = bench.dealers[deal], examined_counts(bench)
  params = bench.init_params(0)
  state = bench.init(params)
  gradient = jax.grad(bench.mean_loss)(params, dealer.images)
  exact = _flatten_rows(jax.tree.map(lambda a: a[None], gradient))[0]
  weighted, plain = [], []
  for step in range(bench.settings.draws):
    batch = dealer.deal_batch(counts, (1,) * cases.WORKERS, 0, step)
    work = bench.step.compute(state, batch, counts=counts)
    means, weight = _flatten_rows(work.grads), np.asarray(work.weight)
    weighted.append(np.average(means, axis=0, weights=weight))
    plain.append(means.mean(axis=0))
  return {
    "weighted": _compute_moments(np.stack(weighted), exact),
    "plain_mean": _compute_moments(np.stack(plain), exact),
  }


def _flatten_rows(tree: Any) -> np.ndarray:
  """Returns all leaves as one row for each worker, their leading axis."""
  leaves = [np.asarray(a, np.float64) for a in jax.tree.leaves(tree)]
  return np.concatenate([a.reshape(len(a), -1) for a in leaves], axis=1)


def _compute_moments(estimates: np.ndarray, exact: np.ndarray) -> Gradients:
  """Returns bias and variance of estimates of a gradient."""
  scale = np.linalg.norm(exact)
  mean = estimates.mean(axis=0)
  variance = ((estimates - mean) ** 2).sum(axis=1).mean() / scale**2
  return Gradients(
    float(np.linalg.norm(mean - exact) / scale),
    float(np.sqrt(variance / len(estimates))),
    float(variance),
  )
