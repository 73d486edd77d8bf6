"""Where arrays are kept between two uses: on the device or on its host."""

import warnings
from typing import Any

import jax

from jaxmotion.core import PyTree, check_choice

MEMORY_KINDS = (None, "pinned_host")


def memory_kinds(device: jax.Device | None = None) -> tuple[str, ...]:
  """Returns the names of the memories that a device says it can address.

  Args:
    device: JAX's first device if None.

  Example:
    >>> "device" in memory_kinds()
    True
  """
  device = _device(device)
  return tuple(memory.kind for memory in device.addressable_memories())


def resolve_memory_kind(
  memory_kind: str | None,
  device: jax.Device | None = None,
  *,
  warn: bool = True,
) -> str | None:
  """Returns where arrays really go that are to be kept at `memory_kind`.

  Args:
    memory_kind: None, the device's own memory, or "pinned_host", memory of the
      host that the device copies to and from by itself.
    device: JAX's first device if None.
    warn: whether to say so where the device has no such memory.

  Returns:
    `memory_kind`, or None where the device has no such memory.

  Raises:
    ValueError: there is no such place.

  Example:
    >>> resolve_memory_kind(None) is None
    True
  """
  check_choice("memory_kind", memory_kind, MEMORY_KINDS)
  kinds = memory_kinds(device)
  if memory_kind is None or memory_kind in kinds:
    return memory_kind
  if warn:
    warnings.warn(
      f"`memory_kind` is {memory_kind!r}, which the "
      f"{_device(device).platform} backend does not have (it has: {', '.join(kinds) or 'none by name'}): what "
      "was to go there stays on the device.",
      stacklevel=3,
    )
  return None


def to_host(tree: PyTree) -> PyTree:
  """Returns the arrays in pinned memory of the host; also under `jit`."""
  return _move(tree, jax.memory.Space.Host)


def to_device(tree: PyTree) -> PyTree:
  """Returns the arrays on the device; also under `jit`."""
  return _move(tree, jax.memory.Space.Device)


def is_on_host(aval: Any) -> bool:
  """Says whether arrays of a type that was traced are on the host."""
  return getattr(aval, "memory_space", None) == jax.memory.Space.Host


def _move(tree: PyTree, space: Any) -> PyTree:
  return jax.tree.map(lambda a: jax.device_put(a, space), tree)


def _device(device: jax.Device | None) -> jax.Device:
  return jax.local_devices()[0] if device is None else device
