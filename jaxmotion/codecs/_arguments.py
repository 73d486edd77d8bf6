"""Checks of the arguments that all codecs take."""

import math
from typing import Any

import jax
import jax.numpy as jnp

from jaxmotion import core, kernels


def check_shaped(name: str, like: Any) -> None:
  """Raises unless an argument has the shape and dtype of a floating array."""
  if not (hasattr(like, "shape") and hasattr(like, "dtype")):
    raise TypeError(
      f"`{name}` must be a floating-point array or ShapeDtypeStruct, got "
      f"{like!r}."
    )
  core.check_float(name, like)


def check_unsharded(name: str, x: Any, unit: int = 0) -> None:
  """Raises if an array is sharded over explicit axes of a mesh."""
  # JAX neither flattens such arrays nor cuts them at positions that depend on
  # their elements.
  if not isinstance(x, jax.Array):
    return
  # The type of an array tells explicit axes from others.
  sharding: Any = getattr(jax.typeof(x), "sharding", None)
  spec: tuple[Any, ...] = tuple(getattr(sharding, "spec", ()))
  if all(axis is None for axis in spec):
    return
  if unit and all(axis is None for axis in spec[1:]):
    parts = math.prod(
      sharding.mesh.shape[axis] for axis in core.spec_axes(spec[0])
    )
    if x.size % (parts * unit) == 0:
      return
  raise ValueError(
    f"`{name}` must not be sharded over explicit mesh axes, got P{spec}: "
    "encode inside jax.shard_map, give `specs=` to an exchange, or reshard "
    "the array to jax.P()."
  )


def check_leaves(leaves: Any) -> None:
  """Raises unless an argument is a list of paths and shapes."""
  noun = "pairs of a path and a shape"
  for leaf in core.check_sequence("leaves", leaves, noun):
    pair = core.check_sequence("leaves", leaf, noun)
    if len(pair) != 2 or not isinstance(pair[0], str):
      raise TypeError(f"`leaves` must be {noun}, got {leaf!r:.200}.")
    check_shaped(f"leaves[{pair[0]!r}]", pair[1])


def check_error_memory(x: Any, memory: Any, decay: Any) -> None:
  """Raises unless the arguments are an array, its error memory and a factor."""
  check_shaped("x", x)
  core.check_instance("memory", memory, kernels.ErrorMemory, "an ErrorMemory")
  if jnp.shape(memory.value) != x.shape or jnp.shape(memory.count) != ():
    raise ValueError(
      f"`x` must have the shape of its memory, {jnp.shape(memory.value)}, got "
      f"{core.shape_string(x)} and a count {jnp.shape(memory.count)}."
    )
  core.check_number("decay", decay, 0, 1, open_low=True)
