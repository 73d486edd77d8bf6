"""Memory kinds: whether arrays stay on the device or in its host's memory."""

import warnings
from typing import Any

import jax

from jaxmotion import core
from jaxmotion.core import PyTree

MEMORY_KINDS = (None, "pinned_host")


def memory_kinds(device: jax.Device | None = None) -> tuple[str, ...]:
  """Returns the names of the memories that a device can address.

  Args:
    device: JAX device; the first local one if None.

  Raises:
    TypeError: `device` is no device.

  Example:
    >>> "device" in memory_kinds()
    True
  """
  device = _resolve_device(device)
  return tuple(memory.kind for memory in device.addressable_memories())


def resolve_memory_kind(
  memory_kind: str | None,
  device: jax.Device | None = None,
  *,
  warn: bool = True,
) -> str | None:
  """Returns the memory kind that arrays requested at `memory_kind` really get.

  Args:
    memory_kind: None for the device's own memory, or "pinned_host" for host
      memory that the device reads and writes by itself.
    device: JAX device; the first local one if None.
    warn: whether to warn if the device has no such memory.

  Returns:
    `memory_kind`, or None if the device has no such memory.

  Raises:
    TypeError: `device` is no device, or `warn` is not True or False.
    ValueError: `memory_kind` is not one of the choices.

  Example:
    >>> resolve_memory_kind(None) is None
    True
  """
  core.check_choice("memory_kind", memory_kind, MEMORY_KINDS)
  core.check_bool("warn", warn)
  kinds = memory_kinds(device)
  if memory_kind is None or memory_kind in kinds:
    return memory_kind
  if warn:
    warnings.warn(
      f"`memory_kind` is {memory_kind!r}, which the "
      f"{_resolve_device(device).platform} backend does not have (it has: "
      f"{', '.join(kinds) or 'none by name'}): these arrays stay on the "
      "device.",
      stacklevel=3,
    )
  return None


def check_device(device: jax.Device | None) -> None:
  """Raises unless `device` is a JAX device or None."""
  if device is not None and not hasattr(device, "addressable_memories"):
    raise TypeError(f"`device` must be a JAX device or None, got {device!r}.")


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


def _resolve_device(device: jax.Device | None) -> jax.Device:
  check_device(device)
  return jax.local_devices()[0] if device is None else device
