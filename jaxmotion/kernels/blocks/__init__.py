"""Passes over blocks: encode, with an error added, and sums of payloads."""

from jaxmotion.kernels._error_memory import ErrorMemory as ErrorMemory
from jaxmotion.kernels.blocks._api import (
  encode as encode,
  encode_error as encode_error,
  encode_mean as encode_mean,
  sum_decoded as sum_decoded,
)
