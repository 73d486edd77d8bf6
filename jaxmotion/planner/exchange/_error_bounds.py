"""What codecs state about their error, whatever the array."""

from __future__ import annotations

import math

from jaxmotion.codecs import (
  Codec,
  cast,
  feedback,
  identity,
  sign,
  topk,
  truncate,
  uniform,
)

# Steps are rounded up to 16 significant bits.
_ROUNDED_UP = 1 + 2.0**-15
# Blocks that follow an array's rows are up to so much longer than asked for.
_LONGER = 1.5


def stated_error(codec: Codec, values: int) -> float | None:
  r"""Returns the greatest relative error of one encoding that a codec states.

  .. math::
    \|decode(encode(x)) - x\| \le \epsilon \|x\|

  for every array of normal values. For `uniform` that is half a step for each
  value of a block, one of which is as large as all levels; for a contraction
  what it may drop. Error memory is taken to be empty.

  Args:
    codec: of arrays.
    values: of the array.

  Returns:
    The bound; None if the codec states none, or one that only holds in the
    range of a narrow format.
  """
  match codec:
    case identity():
      return 0.0
    case feedback():
      return stated_error(codec.codec, values)
    case cast(dtype="bfloat16"):
      return 2.0**-8
    case truncate():
      error = (0.75, 2.0**-7, 2.0**-15, 0.0)[codec.bytes - 1]
      halved = codec.rounding == "nearest" and codec.bytes > 1
      return error / 2 if halved else error
    case uniform():
      return _of_steps(codec, min(codec.block, values))
    case sign():
      return _of_contraction(1 / min(codec.block, values))
    case topk(block=None):
      return _of_contraction(max(codec.density / _LONGER, 1 / values))
    case topk():
      block = min(codec.block or values, values)
      return _of_contraction(max(1, round(codec.density * block)) / block)
  return None


def _of_steps(codec: uniform, block: int) -> float:
  """Of levels that are evenly spaced up to the block's greatest value."""
  if codec.symmetric:
    step = 1 / (2 ** (codec.bits - 1) - 1) if codec.bits > 1 else 2.0
  else:
    step = 2 / (2**codec.bits - 1)
  nearest = codec.rounding == "nearest"
  bound = math.sqrt(block) * step * _ROUNDED_UP * (0.5 if nearest else 1.0)
  # With a level at zero, to the nearest, no value loses more than itself.
  from_zero = codec.symmetric and codec.bits > 1 and nearest
  return min(bound, 1.0) if from_zero else bound


def _of_contraction(kept: float) -> float:
  return math.sqrt(max(0.0, 1 - kept))
