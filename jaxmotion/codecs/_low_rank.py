"""The codec `low_rank`: two thin factors in place of a matrix."""

import dataclasses
import math
from typing import NamedTuple

import jax.numpy as jnp
from jax import lax

from jaxmotion.codecs._arguments import check_shaped
from jaxmotion.codecs._laws import Laws
from jaxmotion.codecs._multi_round import MultiRoundCodec
from jaxmotion.codecs._rounds import Message, Reduced, Rounds
from jaxmotion.core import (
  Array,
  Key,
  PyTree,
  ShapedLike,
  Shared,
  check_int,
  make_key,
  random_words,
  saturate_cast,
  shape_string,
)

# A column that keeps less of its norm than this, after projections onto those
# before it, holds rounding errors and nothing else.
_MIN_KEPT = 1e-5


class Factors(NamedTuple):
  """Payload of `low_rank`: the matrix is left @ right.T.

  Attributes:
    left: float32[rows, rank], orthonormal columns, equal on all workers.
    right: float32[columns, rank].
  """

  left: Array
  right: Array


@dataclasses.dataclass(frozen=True, kw_only=True)
class low_rank(MultiRoundCodec):
  """Approximates the workers' mean by a matrix of low rank (PowerSGD).

  With x_r the matrix of worker r, and q the last step's right factor,
  p = orth(sum_r x_r orth(q)), q = mean_r x_r^T p, and the mean is p q^T. It
  takes two sums, however many workers and matrices there are; each worker sends
  (rows + columns) rank elements for rows x columns. Put it in `feedback`, which
  sends later what is left out.

  An array of more dimensions is a matrix of its last dimension by all others,
  which fits kernels of convolutions (height, width, in, out). A vector is a
  matrix of one row, for which the factors are larger than the vector: give
  vectors another codec, by `rules`.

  Properties: exact from rank min(rows, columns) on, up to float32 rounding;
  the error of one worker's matrix is no greater than the matrix. A column that
  is zero, not finite or dependent on others is replaced by a random one, so
  that the factor keeps its rank whatever the gradients are.

  Args:
    rank: of the approximation, 1 to 65536.
    seed: of the first factor, 0 to 2^32 - 1.

  Example:
    >>> x = jnp.outer(jnp.arange(4.0), jnp.ones(3))
    >>> codec = low_rank(rank=1)
    >>> payload, state = codec.encode(x, codec.init(x))
    >>> jnp.round(codec.decode(payload, x), 4)[:, 0].tolist()
    [0.0, 1.0, 2.0, 3.0]

  References:
    Vogels, Karimireddy and Jaggi, *PowerSGD: Practical Low-Rank Gradient
    Compression for Distributed Optimization*, 2019, algorithms 1 and 2.
  """

  rank: int
  seed: int = 0

  def __post_init__(self) -> None:
    check_int("rank", self.rank, 1, 1 << 16)
    check_int("seed", self.seed, 0, 2**32 - 1)

  @property
  def laws(self) -> Laws:
    """The laws of a projection onto some columns."""
    return Laws(bounds_memory=True, nonfinite="array")

  @property
  def round_kinds(self) -> tuple[str, ...]:
    """Kinds of its messages: the sums of both factors."""
    return ("sum", "sum")

  def init(self, like: ShapedLike) -> Shared:
    """Returns a random right factor, the same on all workers."""
    check_shaped("like", like)
    _, columns, rank = self._dimensions(like)
    return Shared(_random_columns(self.seed, columns, rank))

  def reduce_in_rounds(
    self, x: Array, state: Shared, key: Key | None, workers: int
  ) -> Rounds[Reduced]:
    """Sums the left factors, then the right ones."""
    self._check_input(x, key)
    self._check_state(state)
    rows, columns, rank = self._dimensions(x)
    if state.value.shape != (columns, rank):
      raise ValueError(
        f"`state` must be what `init` returned for {shape_string(x)}, got "
        f"factors of shape {state.value.shape}."
      )
    matrix = x.reshape(rows, columns).astype(jnp.float32)
    spare = _random_columns(self.seed, columns, rank)
    q = orthonormalize(state.value, spare)
    total = yield Message("sum", _multiply(matrix, q))
    p = orthonormalize(total, _random_columns(self.seed, rows, rank))
    own = _multiply(matrix.T, p)
    total = yield Message("sum", own)
    right = total / workers
    mean = _multiply(p, right.T).reshape(x.shape)
    # A layer without a gradient must not end the power iteration.
    usable = jnp.isfinite(right).all(0) & (right != 0).any(0)
    new = jnp.where(usable, right, state.value)
    return Reduced(mean, Factors(p, own), Shared(new))

  def decode(self, payload: Factors, like: ShapedLike) -> Array:
    """Returns the product of the factors."""
    self._check_payload(payload, like)
    y = _multiply(payload.left, payload.right.T).reshape(like.shape)
    return saturate_cast(y, like.dtype)

  def _dimensions(self, like: ShapedLike) -> tuple[int, int, int]:
    """Returns the rows and columns of the matrix, and the factors' rank."""
    columns = like.shape[-1] if like.shape else 1
    rows = math.prod(like.shape[:-1])
    return rows, columns, min(rows, columns, self.rank)

  def _check_state(self, state: PyTree) -> None:
    if not isinstance(state, Shared) or jnp.ndim(state.value) != 2:
      raise ValueError(
        f"`state` must be what `init` returned for {self!r}, got {state!r}."
      )


def orthonormalize(columns: Array, spare: Array) -> Array:
  """Returns orthonormal columns that span those given, by Gram-Schmidt.

  Args:
    columns: float32[n, rank], rank at most n.
    spare: float32[n, rank], independent columns. One takes the place of each
      column that is zero, not finite or dependent on those before it.
  """
  done: list[Array] = []

  def project(c: Array) -> Array:
    for b in done:
      c = c - jnp.sum(b * c) * b
    return c

  for i in range(columns.shape[1]):
    c = columns[:, i]
    greatest = jnp.max(jnp.abs(c))
    usable = (greatest > 0) & jnp.isfinite(greatest)
    # Scaled first: squares of large and small elements leave float32.
    c = jnp.where(usable, c / jnp.where(usable, greatest, 1.0), 0.0)
    before = _norm(c)
    c = project(c)
    kept = _norm(c)
    usable &= kept > _MIN_KEPT * before
    other = project(project(spare[:, i]))
    c = jnp.where(
      usable, c / jnp.where(kept > 0, kept, 1.0), other / _norm(other)
    )
    c = project(c)  # Once more, for orthogonality to float32.
    done.append(c / _norm(c))
  return jnp.stack(done, axis=1) if done else columns


def _norm(c: Array) -> Array:
  return jnp.sqrt(jnp.sum(c * c))


def _multiply(a: Array, b: Array) -> Array:
  # Accelerators multiply float32 in fewer bits by default.
  return jnp.matmul(a, b, precision=lax.Precision.HIGHEST)


def _random_columns(seed: int, rows: int, rank: int) -> Array:
  """Returns columns of normal elements that depend on the seed alone."""
  words = random_words(make_key(seed).shared, (2, rank, rows))
  # In (0, 1), so that the logarithm is finite.
  u, v = (words >> 8).astype(jnp.float32) * 2.0**-24 + 2.0**-25
  return (jnp.sqrt(-2.0 * jnp.log(u)) * jnp.cos(2.0 * jnp.pi * v)).T
