"""Laws of codecs: what a codec promises of every array, as data."""

import dataclasses
import math
from collections.abc import Sequence

from jaxmotion import core

# From the weakest promise to the strongest.
NONFINITE = ("lost", "array", "block", "element")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ErrorBound:
  """Bound of the error of each element.

  |decode(encode(x)) - x| <= relative |x| + peak max|x| + floor, the maximum
  over the array, before the result is rounded to the array's dtype.

  Attributes:
    relative: factor on the element's own magnitude.
    peak: factor on the greatest magnitude of the array.
    floor: error of elements however small.

  Example:
    >>> from jaxmotion import codecs
    >>> bound = codecs.uniform(bits=8).laws.error
    >>> x = jnp.array([1.0, 0.3, -0.7])
    >>> payload, _ = codecs.uniform(bits=8).encode(x)
    >>> error = jnp.abs(codecs.uniform(bits=8).decode(payload, x) - x).max()
    >>> bool(error <= bound.peak * jnp.abs(x).max())
    True
  """

  relative: float = 0.0
  peak: float = 0.0
  floor: float = 0.0

  def __post_init__(self) -> None:
    for field in dataclasses.fields(self):
      core.check_number(field.name, getattr(self, field.name), 0.0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Laws:
  """Promises of a codec, which `testing.check_codec` checks one by one.

  They hold where no element is dropped (`Codec.count_dropped`). The defaults
  promise nothing.

  Attributes:
    lossless: every float32 or narrower array comes back bit for bit.
    keeps_zeros: a zero decodes to a zero, up to `largest`.
    keeps_finite: finite arrays decode to finite arrays; they saturate.
    idempotent: encoding a decoded array again loses nothing more.
    unbiased: the mean of decoded arrays over keys is the array.
    projects: the payload's `values` are P x and decoding them is P^T, where
      the rows of P are orthonormal: a selection or a rotation.
    contraction: greatest d such that ||decode(encode(x)) - x||^2 <=
      (1 - d) ||x||^2 + n floor^2, in expectation over keys; 0 for none.
    bounds_memory: whether the memory of `feedback` stays bounded if arrays do.
    error: bound of each element's error, or None.
    largest: greatest magnitude for which `contraction`, `bounds_memory`,
      `error` and `keeps_zeros` hold.
    nonfinite: what a non-finite element does. "element": it alone decodes to a
      non-finite one. "block": it does, and others of its block may. "array":
      some element does. "lost": it may vanish.

  Example:
    >>> from jaxmotion import codecs
    >>> codecs.identity().laws.lossless, codecs.sign().laws.bounds_memory
    (True, True)
    >>> codecs.uniform(bits=8).laws.unbiased
    False
    >>> codecs.uniform(bits=8, rounding="stochastic").laws.unbiased
    True
  """

  lossless: bool = False
  keeps_zeros: bool = False
  keeps_finite: bool = False
  idempotent: bool = False
  unbiased: bool = False
  projects: bool = False
  contraction: float = 0.0
  bounds_memory: bool = False
  error: ErrorBound | None = None
  largest: float = math.inf
  nonfinite: str = "lost"

  def __post_init__(self) -> None:
    for field in dataclasses.fields(self):
      if field.type is bool:
        core.check_bool(field.name, getattr(self, field.name))
    core.check_number("contraction", self.contraction, 0.0, 1.0)
    if self.error is not None:
      core.check_instance(
        "error", self.error, ErrorBound, "an ErrorBound or None"
      )
    if not (type(self.largest) is float and math.isinf(self.largest)):
      core.check_number("largest", self.largest, 0.0, open_low=True)
    core.check_choice("nonfinite", self.nonfinite, NONFINITE)


# Laws of a codec that loses nothing; its payload need not be a projection.
LOSSLESS = Laws(
  lossless=True,
  keeps_zeros=True,
  keeps_finite=True,
  idempotent=True,
  unbiased=True,
  contraction=1.0,
  bounds_memory=True,
  error=ErrorBound(),
  nonfinite="element",
)


def weakest_laws(laws: Sequence[Laws]) -> Laws:
  """Returns what all of these laws promise together, for codecs of trees."""
  first, *others = laws
  for other in others:
    first = _weaker(first, other)
  return first


def chain_laws(laws: Sequence[Laws]) -> Laws:
  """Returns the laws of codecs that encode each other's values."""
  first = laws[:-1]
  every = weakest_laws(laws)
  if not all(own.projects for own in first):
    return dataclasses.replace(
      every, projects=False, contraction=0.0, bounds_memory=False, error=None
    )
  # Errors of orthogonal parts: ||x - P^T Q(P x)||^2 = ||x - P^T P x||^2
  # + ||P x - Q(P x)||^2, so that what is kept of x is kept in turn.
  contraction = math.prod(own.contraction for own in laws)
  selects = all(own.keeps_zeros for own in first)
  error, largest = _sum_errors(laws), every.largest
  if not selects:
    # A rotation of 256 elements may put all of their energy, 16 times the
    # greatest of them, in one element, and its inverse all of the errors.
    largest = min(*(own.largest for own in first), laws[-1].largest / 16)
    if error is not None:
      error = ErrorBound(
        peak=256 * (error.relative + error.peak), floor=16 * error.floor
      )
  return dataclasses.replace(
    every,
    idempotent=False,
    projects=False,
    contraction=contraction,
    largest=largest,
    error=error,
  )


def _weaker(a: Laws, b: Laws) -> Laws:
  both = {
    field.name: getattr(a, field.name) and getattr(b, field.name)
    for field in dataclasses.fields(Laws)
    if field.type is bool
  }
  error = None
  if a.error and b.error:
    error = ErrorBound(
      relative=max(a.error.relative, b.error.relative),
      peak=max(a.error.peak, b.error.peak),
      floor=max(a.error.floor, b.error.floor),
    )
  return Laws(
    **both,
    contraction=min(a.contraction, b.contraction),
    error=error,
    largest=min(a.largest, b.largest),
    nonfinite=min(a.nonfinite, b.nonfinite, key=NONFINITE.index),
  )


def _sum_errors(laws: Sequence[Laws]) -> ErrorBound | None:
  errors = [own.error for own in laws]
  known = [error for error in errors if error is not None]
  if len(known) < len(errors):
    return None
  return ErrorBound(
    relative=sum(error.relative for error in known),
    peak=sum(error.peak for error in known),
    floor=sum(error.floor for error in known),
  )
