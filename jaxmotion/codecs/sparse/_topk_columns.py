"""The codec `topk_columns`: the largest elements of every column."""

import dataclasses
import math

from jaxmotion import core
from jaxmotion.codecs import _laws
from jaxmotion.codecs.sparse import _topk
from jaxmotion.core import ShapedLike


@dataclasses.dataclass(frozen=True, kw_only=True)
class topk_columns(_topk.SparseCodec):
  """Keeps the elements of largest magnitude of every column of an array.

  A column has the elements that differ in their first index alone. A vector is
  one column, and `tiles` and `dct` make one of each tile. `topk` has blocks of
  a length that does not depend on the array; it is faster.

  Properties: those of `topk`. With a density it is a contraction,
  ||x - decode(encode(x))||^2 <= (1 - density) ||x||^2.

  Args:
    count: number of elements of a column that are sent; all of a shorter one.
    density: share of a column that is sent, rounded up to whole elements.
      Either this or `count` is given.

  Example:
    >>> import jax.numpy as jnp
    >>> x = jnp.array([[0.1, -3.0], [2.0, 0.5]])
    >>> codec = topk_columns(count=1)
    >>> payload, _ = codec.encode(x)
    >>> codec.decode(payload, x).tolist()
    [[0.0, -3.0], [2.0, 0.0]]
  """

  count: int | None = None
  density: float | None = None

  def __post_init__(self) -> None:
    if (self.count is None) == (self.density is None):
      raise ValueError(
        "`count` must be given if `density` is not, and only then, got "
        f"{self.count!r} and density {self.density!r}."
      )
    if self.count is not None:
      core.check_int("count", self.count, 1, 2**31 - 1)
    else:
      core.check_number("density", self.density, 0, 1, open_low=True)

  @property
  def laws(self) -> _laws.Laws:
    """The laws of a projection: elements are exact or zero."""
    contraction = 0.999 * (self.density or 0.0)
    return dataclasses.replace(super().laws, contraction=contraction)

  def _block_shape(self, like: ShapedLike) -> tuple[int, int]:
    length = max(1, like.shape[0] if like.shape else 1)
    if self.count is not None:
      return length, min(self.count, length)
    return length, math.ceil((self.density or 0.0) * length)
