"""Parts of the block passes that kernels of every device share."""

from typing import Any

import jax
import jax.numpy as jnp

from jaxmotion import core
from jaxmotion.core import Array, PyTree, ShapedLike
from jaxmotion.kernels import _block_op


def check_values(like: ShapedLike) -> None:
  """Raises NotImplementedError unless float32 holds all values of a dtype."""
  if jnp.promote_types(like.dtype, jnp.float32) != jnp.float32:
    raise NotImplementedError(
      f"values must fit in float32, got {jnp.dtype(like.dtype).name}"
    )


def check_mean(workers: int, like: ShapedLike) -> None:
  """Raises NotImplementedError unless a kernel's mean is the reference's."""
  # The kernel multiplies by 1 / workers, which equals the reference's division
  # for a power of two of workers only. An array of the mean never exists, so
  # its dtype must be the float32 of the registers.
  if workers & (workers - 1) or like.dtype != jnp.float32:
    raise NotImplementedError(
      "the mean must be float32, of a power of two of workers, got "
      f"{jnp.dtype(like.dtype).name} of {workers}"
    )


def count_workers(payloads: PyTree) -> int:
  """Returns the number of workers whose payloads are stacked."""
  return jax.tree.leaves(payloads)[0].shape[0]


def round_decoded(y: Array, dtype: Any) -> Array:
  """Returns decoded values as the reference adds them."""
  # It decodes to the array's dtype before it adds in float32.
  return core.saturate_cast(y, dtype).astype(jnp.float32)


def op_name(op: _block_op.BlockOp) -> str:
  """Returns the name of an op in the names of its kernels."""
  return type(op).__name__.removesuffix("Op").lower()
