"""Public paths of classes, as tracebacks and reprs print them."""

import inspect
from collections.abc import Mapping
from typing import Any


def set_public_module(name: str, namespace: Mapping[str, Any]) -> None:
  """Makes the public classes of a room name the room as their module."""
  # Python prints `__module__` in tracebacks. It would name the private file in
  # which a class is written, from which nobody should import it.
  # name, namespace: `__name__` and `globals()` of the room.
  for key, value in namespace.items():
    if (
      inspect.isclass(value)
      and not key.startswith("_")
      and value.__module__.startswith(f"{name}.")
    ):
      value.__module__ = name
