"""Offers the parts of a prediction that the planner puts together by itself.

Users of the performance model need none of these names.
"""

from jaxmotion.perfmodel.predict import (
  decode_seconds as decode_seconds,
  encode_seconds as encode_seconds,
  kernel_curve as kernel_curve,
  kernel_seconds as kernel_seconds,
)
