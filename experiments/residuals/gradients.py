"""Distances between gradients with compressed residuals and plain ones."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from experiments.residuals import cases, networks
from jaxmotion.core import PyTree

_LOSSLESS = ("cut", "cut_together")


class GradientErrors(NamedTuple):
  """Errors of the gradient of one network in one mode.

  All errors are relative to the length of plain training's float64 gradient.

  Attributes:
    case: name of the network and its batch in rows.
    mode: name of the mode, a key of `MODES`.
    error: distance to plain training in float64.
    plain_error: the same of plain training in float32.
    from_plain: distance to plain training in float32; None for `plain`.
    equal_share: share of elements equal to plain training's; None for `plain`.
    error_float64: distance of the mode in float64 to plain training in
      float64; None for lossy modes and `plain`.
  """

  case: str
  mode: str
  error: float
  plain_error: float
  from_plain: float | None
  equal_share: float | None
  error_float64: float | None


def compare_gradients(
  spec: networks.NetworkSpec, modes: Sequence[str]
) -> Iterator[GradientErrors]:
  """Runs one step in every mode and yields the errors of its gradient."""
  net = spec.make_network()
  params = net.init(jax.random.key(0))
  batch = _draw_batch(*net.batch(spec.batch), np.random.default_rng(0))
  exact = _compute_in_float64("plain", spec, params, batch)
  length = np.linalg.norm(exact)

  def distance(a: np.ndarray, b: np.ndarray) -> float:
    return float(np.linalg.norm(a - b) / length)

  plain = _flatten_leaves(_make_gradient("plain", spec)(params, batch))
  plain_error = distance(plain, exact)
  for mode in modes:
    if mode == "plain":
      nothing = (None, None, None)
      yield GradientErrors(spec.case, mode, plain_error, plain_error, *nothing)
      continue
    ours = _flatten_leaves(_make_gradient(mode, spec)(params, batch))
    error_float64 = None
    if mode in _LOSSLESS:
      in_float64 = _compute_in_float64(mode, spec, params, batch)
      error_float64 = distance(in_float64, exact)
    yield GradientErrors(
      spec.case,
      mode,
      distance(ours, exact),
      plain_error,
      distance(ours, plain),
      float(np.mean(ours == plain)),
      error_float64,
    )


def _make_gradient(
  mode: str, spec: networks.NetworkSpec
) -> Callable[..., PyTree]:
  step = cases.build_step(mode, spec.make_network(), spec.batch)
  fn = jax.jit(step.fn)
  return lambda params, batch: fn(params, batch)[1]


def _compute_in_float64(
  mode: str, spec: networks.NetworkSpec, params: PyTree, batch: PyTree
) -> np.ndarray:
  gradient = _make_gradient(mode, spec)
  with jax.enable_x64(True):
    wide = jax.tree.map(_widen_array, (params, batch))
    return _flatten_leaves(gradient(*wide))


def _draw_batch(inputs: Any, labels: Any, rng: np.random.Generator) -> PyTree:
  """Returns random images or tokens, and classes from 0 to 9."""
  if jnp.issubdtype(inputs.dtype, jnp.integer):
    drawn = rng.integers(0, 10, inputs.shape).astype(inputs.dtype)
  else:
    drawn = rng.normal(size=inputs.shape).astype(inputs.dtype)
  return drawn, rng.integers(0, 10, labels.shape).astype(labels.dtype)


def _widen_array(a: Any) -> np.ndarray:
  a = np.asarray(a)
  return a.astype(np.float64) if a.dtype == np.float32 else a


def _flatten_leaves(tree: PyTree) -> np.ndarray:
  leaves = [np.asarray(a, np.float64).ravel() for a in jax.tree.leaves(tree)]
  return np.concatenate(leaves)
