"""Block passes: encode, encode with error memory, sum and mean of payloads."""

from jaxmotion.kernels._error_memory import ErrorMemory as ErrorMemory
from jaxmotion.kernels.blocks._api import (
  decode as decode,
  encode as encode,
  encode_error as encode_error,
  encode_error_pass as encode_error_pass,
  encode_mean as encode_mean,
  encode_pass as encode_pass,
  mean_pass as mean_pass,
  payload_like as payload_like,
  sum_decoded as sum_decoded,
  sum_pass as sum_pass,
)
from jaxmotion.kernels.blocks._reference import decode_pass as decode_pass
