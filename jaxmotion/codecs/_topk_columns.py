"""The codec `topk_columns`: the largest elements of every column."""

import dataclasses
import math

from jaxmotion.codecs._codec import Codec
from jaxmotion.codecs._laws import ErrorBound, Laws
from jaxmotion.codecs._topk import Sparse
from jaxmotion.core import (
  Array,
  Key,
  PyTree,
  ShapedLike,
  check_int,
  check_number,
)
from jaxmotion.kernels.pack import pack_flat, unpack_flat
from jaxmotion.kernels.select import topk_scatter, topk_select


@dataclasses.dataclass(frozen=True, kw_only=True)
class topk_columns(Codec):
  """Keeps the elements of largest magnitude of every column of an array.

  A column has the elements that differ in their first index alone: a vector is
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
      check_int("count", self.count, 1, 2**31 - 1)
    else:
      check_number("density", self.density, 0, 1, open_low=True)

  @property
  def laws(self) -> Laws:
    """The laws of a projection: elements are exact or zero."""
    return Laws(
      keeps_zeros=True,
      keeps_finite=True,
      idempotent=True,
      projects=True,
      contraction=0.999 * (self.density or 0.0),
      bounds_memory=True,
      error=ErrorBound(relative=1.0, floor=2.0**-126),
      nonfinite="array",
    )

  def encode(
    self, x: Array, state: PyTree = (), key: Key | None = None
  ) -> tuple[Sparse, PyTree]:
    """Returns the elements and places of every column, and the state."""
    self._check_input(x, key, state)
    length, k, bits = self._column_shape(x)
    values, places = topk_select(x, k, length)
    return Sparse(values.reshape(-1), pack_flat(places, bits)), state

  def decode(self, payload: Sparse, like: ShapedLike) -> Array:
    """Returns zeros with the selected elements where they stood."""
    self._check_payload(payload, like)
    length, k, bits = self._column_shape(like)
    shape = (k, payload.values.size // k)
    places = unpack_flat(payload.indices, bits, payload.values.size)
    return topk_scatter(
      payload.values.reshape(shape), places.reshape(shape), like, length
    )

  def _column_shape(self, like: ShapedLike) -> tuple[int, int, int]:
    """Returns (elements of a column, elements kept of it, bits of a place)."""
    length = max(1, like.shape[0] if like.shape else 1)
    if self.count is not None:
      k = min(self.count, length)
    else:
      k = math.ceil((self.density or 0.0) * length)
    # A power of two: one field, which decodes by one shift.
    bits = max(1, (length - 1).bit_length())
    return length, k, 1 << (bits - 1).bit_length()
