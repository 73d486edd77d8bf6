"""Offers the unchecked parts of a prediction, for rooms that put it together.

These functions take arguments that a public function has checked: the planner
calls them thousands of times for one plan. Users of the performance model need
none of these names.
"""

from jaxmotion.perfmodel._collectives import move_seconds as move_seconds
from jaxmotion.perfmodel._exchange import make_layout as make_layout
from jaxmotion.perfmodel._roofline import (
  decode_seconds as decode_seconds,
  encode_seconds as encode_seconds,
  kernel_curve as kernel_curve,
  kernel_seconds as kernel_seconds,
  operation_seconds as operation_seconds,
  predict_peak as predict_peak,
  predict_ready_seconds as predict_ready_seconds,
  predict_steps as predict_steps,
)
from jaxmotion.perfmodel._step import (
  fill_buckets as fill_buckets,
  predict_timeline as predict_timeline,
  sum_axis_bytes as sum_axis_bytes,
)
