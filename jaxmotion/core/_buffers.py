"""Check of the arrays given to a compiled step that donates some of them."""

import functools
from collections.abc import Collection, Mapping
from typing import Any

import jax

from jaxmotion.core import _tree


def check_buffers(
  args: Mapping[str, _tree.PyTree], donated: Collection[str] = ()
) -> None:
  """Raises unless every array exists and every donated one is given once."""
  # On several devices of one process, XLA:CPU ends the process where it should
  # raise. So the check comes before the call.
  owners: dict[int, str] = {}
  for name, tree in args.items():
    for leaf in jax.tree.leaves(tree):
      kind: Any = type(leaf)
      if not _has_buffer(kind):
        continue
      if leaf.is_deleted():
        raise ValueError(
          f"`{_find_places(args, leaf)[0]}` must be an array that still "
          "exists, got one whose buffer was donated to an earlier call: go on "
          "with what that call returned, copy before it (`jnp.copy`), or make "
          "a step that does not donate."
        )
      if id(leaf) not in owners:
        owners[id(leaf)] = name
        continue
      owner = owners[id(leaf)]
      if owner in donated or name in donated:
        first, second, *_ = _find_places(args, leaf)
        raise ValueError(
          f"`{second}` must be an array of its own, because "
          f"`{owner if owner in donated else name}` is donated, got the array "
          f"of `{first}`: copy one of them with `jnp.copy`."
        )


@functools.cache
def _has_buffer(kind: type) -> bool:
  """Returns whether leaves of this type are arrays of JAX and no tracers."""
  # By type, because `isinstance(leaf, jax.Array)` costs more than the rest of
  # the check, which every step makes.
  return hasattr(kind, "is_deleted") and not issubclass(kind, jax.core.Tracer)


def _find_places(
  args: Mapping[str, _tree.PyTree], leaf: jax.Array
) -> list[str]:
  """Returns the argument and path of every place where the array is given."""
  return [
    f"{name}/{path}" if path else name
    for name, tree in args.items()
    for path, other in _tree.named_leaves(tree)
    if other is leaf
  ]
