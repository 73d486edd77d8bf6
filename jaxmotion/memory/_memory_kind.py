"""Memory kinds: whether arrays stay on the device or in its host's memory."""

import warnings
from typing import Any

import jax

from jaxmotion.core import PyTree

MEMORY_KINDS = (None, "pinned_host")


def can_move(memory_kind: str | None, *, warn: bool = True) -> bool:
  """Says whether arrays can move to a memory kind; None is where they are."""
  device = jax.local_devices()[0]
  kinds = [memory.kind for memory in device.addressable_memories()]
  if memory_kind in kinds:
    return True
  if warn and memory_kind is not None:
    warnings.warn(
      f"`memory_kind` is {memory_kind!r}, which the {device.platform} backend "
      f"does not have (it has: {', '.join(kinds) or 'none by name'}): these "
      "arrays stay on the device.",
      stacklevel=3,
    )
  return False


def to_host(tree: PyTree) -> PyTree:
  """Moves the arrays of a tree to pinned host memory; also under `jit`."""
  return _move_arrays(tree, jax.memory.Space.Host)


def to_device(tree: PyTree) -> PyTree:
  """Moves the arrays of a tree to device memory; also under `jit`."""
  return _move_arrays(tree, jax.memory.Space.Device)


def is_on_host(aval: Any) -> bool:
  """Says whether arrays of a traced type are in host memory."""
  return getattr(aval, "memory_space", None) == jax.memory.Space.Host


def _move_arrays(tree: PyTree, space: Any) -> PyTree:
  return jax.tree.map(lambda a: jax.device_put(a, space), tree)
