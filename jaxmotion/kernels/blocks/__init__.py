"""Block passes: encode, encode with error memory, sum and mean of payloads."""

from jaxmotion.kernels._error_memory import ErrorMemory as ErrorMemory
from jaxmotion.kernels.blocks._api import (
  decode as decode,
  encode as encode,
  encode_error as encode_error,
  encode_mean as encode_mean,
  payload_like as payload_like,
  sum_decoded as sum_decoded,
)
