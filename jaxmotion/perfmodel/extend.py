"""Offers the parts of a prediction that the planner puts together by itself.

Users of the performance model need none of these names.
"""

from jaxmotion.perfmodel.predict import (
  curve_of as curve_of,
  decode_seconds as decode_seconds,
  encode_seconds as encode_seconds,
  kernel_seconds as kernel_seconds,
)
