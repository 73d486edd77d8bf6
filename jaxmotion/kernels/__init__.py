"""Pack and unpack payloads: one op per folder, one file per implementation."""

from jaxmotion.core import set_public_module as _set_public_module
from jaxmotion.kernels._block_layout import (
  block_shape as block_shape,
  is_read_slowly as is_read_slowly,
  nearest_planes as nearest_planes,
  plane_length as plane_length,
)
from jaxmotion.kernels._block_op import (
  BlockOp as BlockOp,
  describe_payload as describe_payload,
)
from jaxmotion.kernels._checks import check_block as check_block
from jaxmotion.kernels._error_memory import (
  ErrorMemory as ErrorMemory,
  add_error as add_error,
  add_error_in_blocks as add_error_in_blocks,
  clear_error as clear_error,
  count_encoding as count_encoding,
  error_of as error_of,
  sum_decoded as sum_decoded,
)

_set_public_module(__name__, globals())
