"""Laws of codecs, and parts of their memory, which they state as data."""

import dataclasses
import math
from collections.abc import Callable, Sequence

import numpy as np

from jaxmotion import core

# From the weakest promise to the strongest.
NONFINITE = ("lost", "array", "block", "element")
MAX_FLOAT32 = float(np.finfo(np.float32).max)
# 2^-126: what is less counts as zero in arithmetic, and so any codec may lose
# it. Floors of laws are this, or a few times as much.
LEAST_FLOAT32 = float(np.finfo(np.float32).tiny)
_SIZE = core.number(0.0)


@dataclasses.dataclass(frozen=True, kw_only=True)
@core.declare(relative=_SIZE, peak=_SIZE, floor=_SIZE)
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


@dataclasses.dataclass(frozen=True, kw_only=True)
@core.declare(
  contraction=core.number(0.0, 1.0),
  error=core.optional(core.instance(ErrorBound, "an ErrorBound or None")),
  nonfinite=core.choice(NONFINITE),
)
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
        core.boolean(field.name, getattr(self, field.name))
    if not (type(self.largest) is float and math.isinf(self.largest)):
      core.number(0.0, open_low=True)("largest", self.largest)


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
# Laws of a codec that moves elements and changes none.
PERMUTED = dataclasses.replace(LOSSLESS, projects=True)
# Laws of codecs that round each element to a value that encodes to itself: to a
# narrow float, or to zero unless it is selected.
ROUNDED = Laws(
  keeps_zeros=True, keeps_finite=True, idempotent=True, bounds_memory=True
)


def weakest_laws(laws: Sequence[Laws]) -> Laws:
  """Returns what all of these laws promise together, for codecs of trees."""
  flags = {
    field.name: all(getattr(own, field.name) for own in laws)
    for field in dataclasses.fields(Laws)
    if field.type is bool
  }
  return Laws(
    **flags,
    contraction=min(own.contraction for own in laws),
    error=_combine_errors(laws, max),
    largest=min(own.largest for own in laws),
    nonfinite=min((own.nonfinite for own in laws), key=NONFINITE.index),
  )


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
  error, largest = _combine_errors(laws, sum), every.largest
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


def _combine_errors(
  laws: Sequence[Laws], combine: Callable[[Sequence[float]], float]
) -> ErrorBound | None:
  """Combines error bounds field by field; None if a codec states none."""
  errors = [own.error for own in laws if own.error]
  if len(errors) < len(laws):
    return None
  names = [field.name for field in dataclasses.fields(ErrorBound)]
  return ErrorBound(
    **{name: combine([getattr(e, name) for e in errors]) for name in names}
  )


@dataclasses.dataclass(frozen=True)
@core.declare(
  name=core.text,
  is_pending=core.boolean,
  keeps_mean=core.boolean,
  row_of=core.instance((str, type(None)), "the name of a part or None"),
  noun=core.text,
  kept_by=core.text,
)
class MemoryPart:
  """Part of what a codec remembers of one array, and what it stands for.

  A part is float32 of the array's shape, in units of the mean: what counts is
  its mean over workers. When the number of workers changes, weights that keep
  this mean mix the parts of the old workers.

  Attributes:
    name: key of the part in what `Codec.read_memory` returns. A codec goes on
      from the parts of another codec that have the same names.
    is_pending: whether the part is still to be sent, such as error memory.
      `checkpoint.resize` forgets it with `reset_memory`, and `metrics` reports
      its norm.
    keeps_mean: whether the mean stays when the result is a sum over workers.
      All other parts enter the result: their sum over workers stays then.
    row_of: name of the part that this one adds to, or None. Such a part is one
      row of an array that workers keep together: float32[row], and the rows of
      all workers, one after another, begin with the elements of the array.
      `write_memory` is not given it: it is added to the part of that name.
    noun: what the part is, in messages; "" for the name.
    kept_by: name of a codec that keeps the part around another codec, for
      messages; "" for none.

  Example:
    >>> from jaxmotion import codecs
    >>> codec = codecs.feedback(codecs.topk(density=0.1))
    >>> codec = codecs.momentum_correction(codec)
    >>> [part.name for part in codec.memory_parts]
    ['momentum', 'error']
  """

  name: str
  _: dataclasses.KW_ONLY
  is_pending: bool = False
  keeps_mean: bool = False
  row_of: str | None = None
  noun: str = ""
  kept_by: str = ""


ERROR = MemoryPart(
  "error", is_pending=True, noun="error memory", kept_by="feedback"
)
MOMENTUM = MemoryPart(
  "momentum", noun="a momentum", kept_by="momentum_correction"
)
# The mean of what workers have sent is what all of them know, whatever is made
# of the result.
SENT = MemoryPart(
  "sent", keeps_mean=True, noun="a memory of what was sent", kept_by="ef21"
)


def nest_parts(
  part: MemoryPart, inner: Sequence[MemoryPart]
) -> tuple[MemoryPart, ...]:
  """Returns a part and those of the codec inside; raises if names collide."""
  if part.name in [other.name for other in inner]:
    raise ValueError(
      f"`codec` must remember no {part.name!r} inside of a codec that does: "
      f"one name cannot stand for two parts, got {[p.name for p in inner]}."
    )
  return (part, *inner)
