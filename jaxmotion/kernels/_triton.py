"""What the Pallas kernels for NVIDIA GPUs (Triton) have in common.

References are whole arrays in the GPU's memory; a kernel computes the indices
of what it loads and stores, so that a tile may be made of runs that are far
apart.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from jaxmotion.core import Array, PyTree, shape_varying_like

# Indices are int32, and the last tile may go beyond the end.
_MOST_VALUES = 2**31 - 2**16
# Values a thread holds, about: enough loads in flight, and registers for all.
_PER_THREAD = 16
_MOST_WARPS = 16


def call(
  kernel: Callable[..., None],
  name: str,
  tiles: int,
  tile_values: int,
  inputs: Sequence[Array],
  outputs: PyTree,
  *,
  aliases: dict[int, int] | None = None,
  interpret: bool = False,
) -> PyTree:
  """Runs a kernel on every tile.

  Args:
    kernel: called with a reference to each input and output, all whole and
      flat; `pl.program_id(0)` says which tile it is.
    name: of the kernel, in profiles.
    tiles: how many there are.
    tile_values: values in a tile, which sets how many threads work on it.
    inputs: arrays.
    outputs: pytree of ShapeDtypeStructs.
    aliases: inputs whose memory outputs take, by position.
    interpret: runs the kernel's body as `jax.numpy`, on any backend.

  Raises:
    NotImplementedError: an array is too large for 32-bit indices, or empty.
  """
  leaves, treedef = jax.tree.flatten(outputs)
  for a in (*inputs, *leaves):
    if not 0 < a.size <= _MOST_VALUES:
      raise NotImplementedError(
        f"arrays must have 1 to {_MOST_VALUES} values, got {a.size}"
      )
  flat = pl.pallas_call(
    kernel,
    grid=(tiles,),
    in_specs=[pl.BlockSpec(memory_space=pl.ANY) for _ in inputs],
    out_specs=[pl.BlockSpec(memory_space=pl.ANY) for _ in leaves],
    out_shape=[shape_varying_like((a.size,), a.dtype, inputs) for a in leaves],
    input_output_aliases=aliases or {},
    compiler_params=plgpu.CompilerParams(num_warps=_warps(tile_values)),
    interpret=interpret,
    name=name,
  )(*(a.reshape(-1) for a in inputs))
  shaped_as_asked = [
    y.reshape(a.shape) for y, a in zip(flat, leaves, strict=True)
  ]
  return jax.tree.unflatten(treedef, shaped_as_asked)


def _warps(values: int) -> int:
  return max(1, min(_MOST_WARPS, values // (32 * _PER_THREAD)))


def load(ref: Any, index: Array, mask: Array | None = None) -> Array:
  """Loads values at any indices; zeros where the mask is False."""
  if mask is None:
    return plgpu.load(ref.at[index])
  return plgpu.load(ref.at[index], mask=mask, other=jnp.zeros((), ref.dtype))


def scalar(ref: Any) -> Array:
  """Loads the only value of an array."""
  return plgpu.load(ref.at[jnp.int32(0)])


def store(
  ref: Any, index: Array, value: Array, mask: Array | None = None
) -> None:
  """Stores values at any indices, where the mask is not False."""
  value = jnp.broadcast_to(value, index.shape).astype(ref.dtype)
  plgpu.store(ref.at[index], value, mask=mask)


def power_of_two(n: int) -> int:
  """Returns the least power of two that is not below n: Triton's tile sizes.

  >>> power_of_two(500), power_of_two(512), power_of_two(1)
  (512, 512, 1)
  """
  return 1 << (n - 1).bit_length()
