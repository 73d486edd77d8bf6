"""Error bounds that codecs guarantee for any array."""

from __future__ import annotations

import math

from jaxmotion import codecs

# Codecs round scales up to 16 significant bits.
_ROUNDED_UP = 1 + 2.0**-15
# Blocks follow the rows of an array: they may be this much longer than
# `codec.block` asks for.
_LONGER = 1.5


def relative_error_bound(codec: codecs.Codec, elements: int) -> float | None:
  r"""Returns the greatest relative error of one encoding.

  .. math::
    \|decode(encode(x)) - x\| \le \epsilon \|x\|

  for every array of normal floating-point elements. `uniform` may lose half a
  step on each element of a block whose largest element defines the levels. A
  contraction (`sign`, `topk`) may lose what it is allowed to drop. The error
  memory is taken to be empty.

  Args:
    codec: codec of arrays.
    elements: number of elements of the array.

  Returns:
    The bound `epsilon`. None if the codec guarantees none, or one that only
    holds within the range of a narrow format.
  """
  match codec:
    case codecs.identity():
      return 0.0
    case codecs.feedback():
      return relative_error_bound(codec.codec, elements)
    case codecs.cast(dtype="bfloat16"):
      return 2.0**-8
    case codecs.truncate():
      error = (0.75, 2.0**-7, 2.0**-15, 0.0)[codec.bytes - 1]
      is_halved = codec.rounding == "nearest" and codec.bytes > 1
      return error / 2 if is_halved else error
    case codecs.uniform():
      return _bound_levels(codec, min(codec.block, elements))
    case codecs.sign():
      return _bound_contraction(1 / min(codec.block, elements))
    case codecs.topk(block=None):
      return _bound_contraction(max(codec.density / _LONGER, 1 / elements))
    case codecs.topk():
      block = min(codec.block or elements, elements)
      count = max(1, round(codec.density * block))
      return _bound_contraction(count / block)
  return None


def _bound_levels(codec: codecs.uniform, block: int) -> float:
  """Bounds the error of levels evenly spaced up to a block's largest
  element."""
  # Each of `block` elements is off by at most half a step, or by a whole step
  # if rounding is stochastic. Steps are shares of the block's largest element,
  # and the norm of the block is at least that element.
  if codec.symmetric:
    step = 1 / (2 ** (codec.bits - 1) - 1) if codec.bits > 1 else 2.0
  else:
    step = 2 / (2**codec.bits - 1)
  is_nearest = codec.rounding == "nearest"
  bound = math.sqrt(block) * step * _ROUNDED_UP * (0.5 if is_nearest else 1.0)
  # With a level at zero and rounding to the nearest level, no element loses
  # more than itself.
  has_zero_level = codec.symmetric and codec.bits > 1 and is_nearest
  return min(bound, 1.0) if has_zero_level else bound


def _bound_contraction(kept_share: float) -> float:
  """Bounds the error of a codec that keeps this share of the squared norm."""
  return math.sqrt(max(0.0, 1 - kept_share))
