"""The error of every codec on every tensor, measured or stated."""

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxmotion.codecs import Codec
from jaxmotion.core import (
  Array,
  PyTree,
  make_key,
  named_leaves,
  same_structure,
  shape_string,
)
from jaxmotion.planner.exchange._error_bounds import stated_error


class Errors(NamedTuple):
  """Squared errors of one encoding.

  Attributes:
    squares: float64[tensors, codecs], `||decode(encode(g)) - g||^2`.
    norms: float64[tensors], `||g||^2`.
    measured: whether they are those of a gradient. Else they are bounds for
      gradients whose values are all of one size.
  """

  squares: np.ndarray
  norms: np.ndarray
  measured: bool

  def relative(self, tensor: int, codec: int) -> float:
    """Relative error of a tensor."""
    norm = float(self.norms[tensor])
    return math.sqrt(float(self.squares[tensor, codec]) / norm) if norm else 0.0

  def total(self, choice: np.ndarray) -> float:
    """Relative error of the whole gradient, or a bound on it."""
    if not self.measured:
      # However large each tensor is beside the others.
      return max(self.relative(i, int(c)) for i, c in enumerate(choice))
    lost = self.squares[np.arange(len(choice)), choice].sum()
    return math.sqrt(float(lost / self.norms.sum()))

  def limits(self, budget: float) -> tuple[np.ndarray, float]:
    """Squared errors, and what their sum may be.

    Args:
      budget: greatest relative error. A bound has to fit for each tensor by
        itself: it then does whatever the gradient.

    Returns:
      Errors, infinite where a codec may not be used, and their limit.
    """
    budget *= 1 + 1e-9  # Rounding.
    if self.measured:
      return self.squares, budget**2 * float(self.norms.sum())
    fits = self.squares <= budget**2 * self.norms[:, None]
    return np.where(fits, self.squares, np.inf), sys.float_info.max


def stated(params: PyTree, candidates: Sequence[Codec]) -> Errors:
  """Returns what the codecs state of any gradient.

  Raises:
    ValueError: a codec states no bound.
  """
  sizes = [math.prod(leaf.shape) for leaf in jax.tree.leaves(params)]
  squares = np.zeros((len(sizes), len(candidates)))
  for j, codec in enumerate(candidates):
    for i, size in enumerate(sizes):
      bound = stated_error(codec, size) if size else 0.0
      if bound is None:
        raise ValueError(
          "`gradients` must be given for a codec that states no bound on its "
          f"relative error, got None for {codec!r}."
        )
      squares[i, j] = size * bound**2
  return Errors(squares, np.array(sizes, float), measured=False)


def measured(
  params: PyTree, candidates: Sequence[Codec], gradients: PyTree
) -> Errors:
  """Returns the errors of encoding real gradients once.

  Raises:
    ValueError: gradients that are not those of the parameters, or not finite,
      or all zero.
  """
  _check_gradients(params, gradients)
  squares, norms = [], []
  for path, leaf in named_leaves(gradients):
    exact = np.asarray(leaf, np.float64)
    if not np.isfinite(exact).all():
      raise ValueError(f"`gradients` must be finite, got others at {path!r}.")
    norms.append(_square(exact))
    squares.append([_lost(codec, leaf, exact) for codec in candidates])
  if not sum(norms):
    raise ValueError("`gradients` must not be all zero, got zeros alone.")
  return Errors(np.array(squares), np.array(norms), measured=True)


def _check_gradients(params: PyTree, gradients: PyTree) -> None:
  if not same_structure(params, gradients):
    raise ValueError(
      "`gradients` must have the structure of `params`, "
      f"{jax.tree.structure(params)}, got {jax.tree.structure(gradients)}."
    )
  pairs = zip(named_leaves(params), named_leaves(gradients), strict=True)
  for (path, leaf), (_, gradient) in pairs:
    if tuple(leaf.shape) != tuple(gradient.shape):
      raise ValueError(
        "`gradients` must have the shapes of `params`, "
        f"{shape_string(leaf)} at {path!r}, got {shape_string(gradient)}."
      )


def _lost(codec: Codec, x: Array, exact: np.ndarray) -> float:
  # An exchange hands codecs float32, but those that keep the dtype.
  x = x if codec.keeps_dtype else jnp.asarray(x, jnp.float32)
  lost = _square(np.asarray(_round_trip(codec)(x), np.float64) - exact)
  # What decodes to no number has lost more than any budget allows.
  return lost if math.isfinite(lost) else math.inf


def _square(x: np.ndarray) -> float:
  return float(np.sum(np.square(x)))


@functools.lru_cache(maxsize=256)
def _round_trip(codec: Codec) -> Any:
  @jax.jit
  def round_trip(x: Array) -> Array:
    payload, _ = codec.encode(x, codec.init(x), make_key(0))
    return codec.decode(payload, x)

  return round_trip
