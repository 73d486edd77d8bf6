"""Encoding errors of every candidate codec, measured or guaranteed."""

import functools
import math
import sys
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxmotion import codecs, core
from jaxmotion.core import Array, PyTree


class EncodingErrors(NamedTuple):
  """Squared errors of encoding each tensor's gradient once.

  Attributes:
    squares: float64[tensors, codecs], `||decode(encode(g)) - g||^2`.
    norms: float64[tensors], `||g||^2`.
    is_measured: whether the errors were measured on a gradient. Otherwise
      they are bounds, for gradients whose elements all have magnitude 1.
  """

  squares: np.ndarray
  norms: np.ndarray
  is_measured: bool

  def relative_error(self, tensor: int, codec: int) -> float:
    """Returns the relative error of one tensor with one codec."""
    norm = float(self.norms[tensor])
    return math.sqrt(float(self.squares[tensor, codec]) / norm) if norm else 0.0

  def total_error(self, choice: np.ndarray) -> float:
    """Returns the relative error of the whole gradient, or a bound on it."""
    # `choice`: int[tensors], a codec for each tensor.
    if not self.is_measured:
      # The relative sizes of the tensors' gradients are unknown: the worst
      # tensor may be the only one that is not zero.
      return max(self.relative_error(i, int(c)) for i, c in enumerate(choice))
    lost = self.squares[np.arange(len(choice)), choice].sum()
    return math.sqrt(float(lost / self.norms.sum()))

  def squared_limits(self, budget: float) -> tuple[np.ndarray, float]:
    """Returns squared errors and the limit of their sum over tensors."""
    # Returns float64[tensors, codecs], infinite where a codec must not be used,
    # and the limit.
    # Allows for rounding in the sum of squares.
    budget *= 1 + 1e-9
    if self.is_measured:
      return self.squares, budget**2 * float(self.norms.sum())
    fits = self.squares <= budget**2 * self.norms[:, None]
    return np.where(fits, self.squares, np.inf), sys.float_info.max


def bound_errors(
  params: PyTree, candidates: Sequence[codecs.Codec]
) -> EncodingErrors:
  """Returns the errors that the codecs guarantee for any gradient."""
  sizes = [math.prod(leaf.shape) for leaf in jax.tree.leaves(params)]
  squares = np.zeros((len(sizes), len(candidates)))
  for j, codec in enumerate(candidates):
    for i, size in enumerate(sizes):
      bound = relative_error_bound(codec, size) if size else 0.0
      if bound is None:
        raise ValueError(
          "`gradients` must be given for a codec that states no bound on its "
          f"relative error, got None for {codec!r}."
        )
      squares[i, j] = size * bound**2
  return EncodingErrors(squares, np.array(sizes, float), is_measured=False)


def measure_errors(
  params: PyTree, candidates: Sequence[codecs.Codec], gradients: PyTree
) -> EncodingErrors:
  """Returns the errors of encoding real gradients once."""
  _check_gradients(params, gradients)
  squares, norms = [], []
  for path, gradient in core.named_leaves(gradients):
    exact = np.asarray(gradient, np.float64)
    if not np.isfinite(exact).all():
      raise ValueError(f"`gradients` must be finite, got others at {path!r}.")
    norms.append(_squared_norm(exact))
    squares.append([_squared_error(c, gradient, exact) for c in candidates])
  if not sum(norms):
    raise ValueError("`gradients` must not be all zero, got zeros alone.")
  return EncodingErrors(np.array(squares), np.array(norms), is_measured=True)


def _check_gradients(params: PyTree, gradients: PyTree) -> None:
  """Raises unless gradients are arrays of the shapes of the parameters."""
  if not core.same_structure(params, gradients):
    raise ValueError(
      "`gradients` must have the structure of `params`, "
      f"{jax.tree.structure(params)}, got {jax.tree.structure(gradients)}."
    )
  pairs = zip(
    core.named_leaves(params), core.named_leaves(gradients), strict=True
  )
  for (path, leaf), (_, gradient) in pairs:
    if isinstance(gradient, jax.core.Tracer | jax.ShapeDtypeStruct):
      raise TypeError(
        f"`gradients` must be arrays with values, got {gradient!r} at {path!r}."
      )
    if tuple(leaf.shape) != jnp.shape(gradient):
      raise ValueError(
        "`gradients` must have the shapes of `params`, "
        f"{core.shape_string(leaf)} at {path!r}, got"
        f" {core.shape_string(jnp.asarray(gradient))}."
      )


def _squared_error(codec: codecs.Codec, x: Array, exact: np.ndarray) -> float:
  """Returns the squared error of encoding an array once."""
  # An exchange hands float32 to all codecs except those that keep the dtype.
  x = x if codec.keeps_dtype else jnp.asarray(x, jnp.float32)
  decoded = np.asarray(_round_trip(codec, x), np.float64)
  lost = _squared_norm(decoded - exact)
  # A non-finite result has lost more than any budget allows.
  return lost if math.isfinite(lost) else math.inf


def _squared_norm(x: np.ndarray) -> float:
  return float(np.sum(np.square(x)))


@functools.partial(jax.jit, static_argnums=0)
def _round_trip(codec: codecs.Codec, x: Array) -> Array:
  payload, _ = codec.encode(x, codec.init(x), core.make_key(0))
  return codec.decode(payload, x)


def relative_error_bound(codec: codecs.Codec, elements: int) -> float | None:
  """Returns a bound on the relative error of one encoding, or None."""
  # `||decode(encode(x)) - x|| <= bound ||x||` for every array of normal
  # floating-point elements, with empty error memory. None is a codec that
  # guarantees nothing, or only within the range of a narrow format.
  laws = codec.laws
  match codec:
    case codecs.feedback():
      return relative_error_bound(codec.codec, elements)
    case codecs.identity() | codecs.cast(dtype="bfloat16") | codecs.truncate():
      assert laws.error is not None
      return laws.error.relative
    case codecs.uniform():
      assert laws.error is not None
      # Each of `block` elements is off by a share of the block's largest
      # element, and the norm of the block is at least that element.
      bound = math.sqrt(min(codec.block, elements)) * laws.error.peak
      # With a level at zero and rounding to the nearest level, no element loses
      # more than itself.
      is_nearest = not laws.unbiased
      return min(bound, 1.0) if laws.keeps_zeros and is_nearest else bound
    case codecs.sign() | codecs.topk():
      # The element that is kept has at least 1 / block of the squared norm, and
      # no more of it if all elements are equal.
      least = 1 / min(codec.block or elements, elements)
      return math.sqrt(max(0.0, 1 - max(laws.contraction, least)))
  return None
