"""Side effects that a function may have whose parts may run again."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from jaxmotion.core import PyTree

# Effects that `jax.checkpoint` allows. Inside shard_map the names of mesh axes
# count as effects.
_ALLOWED_EFFECTS = (
  "DebugEffect",
  "ErrorEffect",
  "NamedAxisEffect",
  "OrderedDebugEffect",
)


def check_effects(fn: Callable[..., PyTree], effects: Any) -> None:
  """Raises if a function has side effects that must happen exactly once."""
  found = [e for e in effects if type(e).__name__ not in _ALLOWED_EFFECTS]
  if found:
    inner = fn.func if isinstance(fn, functools.partial) else fn
    name = getattr(inner, "__name__", repr(inner))
    raise ValueError(
      "`fn` must have no side effects but those of `jax.debug` and `checkify`, "
      f"got {name} with {found}: its backward pass may run parts of it again."
    )
