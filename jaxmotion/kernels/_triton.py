"""Shared parts of the Pallas kernels for NVIDIA GPUs (Triton).

A kernel's references are whole arrays in the GPU's memory. The kernel computes
the indices of its loads and stores, so a tile may consist of runs that are far
apart.

Pallas is imported inside functions alone: hosts never run it, and importing it
would lengthen `import jaxmotion`.
"""

import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxmotion import core
from jaxmotion.core import Array, PyTree, ShapedLike
from jaxmotion.kernels import _dispatch

# Indices are int32, and the last tile may reach beyond the end.
_MAX_ELEMENTS = 2**31 - 2**16
# Elements per thread, about: enough loads in flight, and registers for all.
_PER_THREAD = 16
_MAX_WARPS = 16


def call_kernel(
  kernel: Callable[..., None],
  name: str,
  tiles: int,
  tile_elements: int,
  inputs: Sequence[Array],
  outputs: PyTree,
  *,
  aliases: dict[int, int] | None = None,
) -> PyTree:
  """Runs a kernel once for every tile."""
  from jax.experimental import pallas as pl
  from jax.experimental.pallas import triton as plgpu

  leaves, treedef = jax.tree.flatten(outputs)
  for a in (*inputs, *leaves):
    if not 0 < a.size <= _MAX_ELEMENTS:
      raise NotImplementedError(
        f"arrays must have 1 to {_MAX_ELEMENTS} values, got {a.size}"
      )
  call = pl.pallas_call(
    kernel,
    grid=(tiles,),
    in_specs=[pl.BlockSpec(memory_space=pl.ANY) for _ in inputs],
    out_specs=[pl.BlockSpec(memory_space=pl.ANY) for _ in leaves],
    out_shape=[
      core.shape_varying_like((a.size,), a.dtype, inputs) for a in leaves
    ],
    input_output_aliases=aliases or {},
    compiler_params=plgpu.CompilerParams(num_warps=_count_warps(tile_elements)),
    interpret=_dispatch.INTERPRETS_KERNELS,
    name=name,
  )
  # Where functions are traced in place (`core.trace_in_place`), JAX would write
  # a loop of the kernel out.
  with jax.disable_jit(False):
    flat = call(*(a.reshape(-1) for a in inputs))
  shaped = [y.reshape(a.shape) for y, a in zip(flat, leaves, strict=True)]
  return jax.tree.unflatten(treedef, shaped)


def reject_wide(*arrays: ShapedLike) -> None:
  """Raises NotImplementedError for elements of more than 32 bits."""
  for a in arrays:
    if jnp.dtype(a.dtype).itemsize > 4:
      name = jnp.dtype(a.dtype).name
      raise NotImplementedError(f"values must have 32 bits, got {name}")


def _count_warps(elements: int) -> int:
  return max(1, min(_MAX_WARPS, elements // (32 * _PER_THREAD)))


def tile_index() -> Array:
  """Returns the number of the tile that the running kernel computes."""
  from jax.experimental import pallas as pl

  return pl.program_id(0)


def load(ref: Any, index: Array, mask: Array | None = None) -> Array:
  """Loads elements at any indices; zeros where the mask is False."""
  from jax.experimental.pallas import triton as plgpu

  if mask is None:
    return plgpu.load(ref.at[index])
  return plgpu.load(ref.at[index], mask=mask, other=jnp.zeros((), ref.dtype))


def load_scalar(ref: Any) -> Array:
  """Loads the only element of an array."""
  return load(ref, jnp.int32(0))


def store(
  ref: Any, index: Array, value: Array, mask: Array | None = None
) -> None:
  """Stores elements at any indices, except where the mask is False."""
  from jax.experimental.pallas import triton as plgpu

  value = jnp.broadcast_to(value, index.shape).astype(ref.dtype)
  plgpu.store(ref.at[index], value, mask=mask)


def inside_limit(place: Array, limit: int, step: int) -> Array | None:
  """Returns which places are below a limit, None if steps fill it exactly."""
  # No mask where none is needed: one would narrow loads and stores.
  return place < limit if limit % step else None


def join_masks(*masks: Array | None) -> Array | None:
  """Returns where all masks hold; None is a mask that holds everywhere."""
  given = [mask for mask in masks if mask is not None]
  return functools.reduce(operator.and_, given) if given else None


def power_of_two(n: int) -> int:
  """Returns the least power of two that is not below n, as Triton's tiles need.

  >>> power_of_two(500), power_of_two(512), power_of_two(1)
  (512, 512, 1)
  """
  return 1 << (n - 1).bit_length()
