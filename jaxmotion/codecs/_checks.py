"""Checks of what codecs are given; errors name the argument and its value."""

import math
from typing import Any

import jax
import jax.numpy as jnp

from jaxmotion import core
from jaxmotion.core import PyTree, ShapedLike

WORKERS = core.integer(1, 2**31 - 1)
FRACTION = core.number(0, 1, open_low=True)


def check_shaped(name: str, like: Any) -> Any:
  """Returns what has the shape and dtype of a floating array, or raises."""
  if not (hasattr(like, "shape") and hasattr(like, "dtype")):
    raise TypeError(
      f"`{name}` must be a floating-point array or ShapeDtypeStruct, got "
      f"{like!r}."
    )
  return core.float_array(name, like)


def check_unsharded(x: Any, unit: int = 0) -> None:
  """Raises if an array to encode is sharded over explicit axes of a mesh."""
  # JAX neither flattens such arrays nor cuts them at positions that depend on
  # their elements.
  if not isinstance(x, jax.Array):
    return
  # The type of an array tells explicit axes from others.
  sharding: Any = getattr(jax.typeof(x), "sharding", None)
  spec: tuple[Any, ...] = tuple(getattr(sharding, "spec", ()))
  if spec.count(None) == len(spec):
    return
  if unit and all(axis is None for axis in spec[1:]):
    parts = math.prod(
      sharding.mesh.shape[axis] for axis in core.spec_axes(spec[0])
    )
    if x.size % (parts * unit) == 0:
      return
  raise ValueError(
    f"`x` must not be sharded over explicit mesh axes, got P{spec}: "
    "encode inside jax.shard_map, give `specs=` to `make_train_step`, or "
    "reshard the array to jax.P()."
  )


def check_leaves(name: str, value: Any) -> Any:
  """Returns pairs of a path and a shape, or raises."""
  noun = "pairs of a path and a shape"
  leaves = core.sequence(noun, core.sequence(noun))(name, value)
  for leaf in leaves:
    if len(leaf) != 2 or not isinstance(leaf[0], str):
      raise TypeError(f"`{name}` must be {noun}, got {leaf!r:.200}.")
    check_shaped(f"{name}[{leaf[0]!r}]", leaf[1])
  return leaves


def check_nothing(codec: Any, state: Any) -> None:
  """Raises unless a state is that of a codec that remembers nothing."""
  if not (isinstance(state, tuple) and state == ()):
    raise ValueError(
      f"`state` must be () for {codec}, which remembers nothing, got {state!r}."
    )


def check_state(codec: Any, state: Any, fits: bool) -> None:
  """Raises if a state does not fit a codec."""
  if not fits:
    raise ValueError(
      f"`state` must be what `init` returned for {codec!r}, got {state!r}."
    )


def check_unread(codec: Any, state: Any) -> None:
  """Raises if a state has parts of a worker's own, which no method reads."""
  if jax.tree.leaves(core.drop_shared(state)):
    raise ValueError(
      "`codec` must say what it remembers of an array, got one that does not: "
      f"{codec!r}. Give it `memory_parts`, `read_memory` and `write_memory`."
    )


def check_payload(
  codec: Any, payload: PyTree, like: ShapedLike, *, stacked: bool
) -> None:
  """Raises unless payloads have the expected shapes, stacked or not."""
  wanted = codec.payload_like(like)
  # The leading axis is that of workers.
  skipped = int(stacked)
  treedef: Any
  leaves, treedef = jax.tree.flatten(payload)
  likes, expected = jax.tree.flatten(wanted)
  if treedef == expected and all(
    hasattr(a, "dtype") and a.dtype == b.dtype and a.shape[skipped:] == b.shape
    for a, b in zip(leaves, likes, strict=True)
  ):
    return

  def describe(leaf: Any) -> str:
    if not hasattr(leaf, "dtype"):
      return repr(leaf)
    return core.shape_string(
      jax.ShapeDtypeStruct(leaf.shape[skipped:], leaf.dtype)
    )

  name = "payloads" if stacked else "payload"
  rows = "stacked along a leading axis of workers, " if stacked else ""
  each = " each" if stacked else ""
  raise ValueError(
    f"`{name}` must be what {codec} makes of {core.shape_string(like)}, "
    f"{rows}{jax.tree.map(core.shape_string, wanted)}{each}, got "
    f"{jax.tree.map(describe, payload)}."
  )


_PARTS = core.mapping("names to parts of a memory")
# Of `write_memory`, whose body calls `check_parts`.
declare_parts = core.declare(
  parts=_PARTS, means=_PARTS, like=check_shaped, workers=WORKERS
)


def check_parts(codec: Any, parts: Any, means: Any, like: ShapedLike) -> None:
  """Raises unless arguments of `write_memory` have all of a codec's parts."""
  for name, arrays in (("parts", parts), ("means", means)):
    for part in codec.memory_parts:
      if part.row_of is not None:
        continue
      if part.name not in arrays:
        raise ValueError(
          f"`{name}` must have the part {part.name!r}, got {sorted(arrays)}."
        )
      x = core.float_array(f"{name}[{part.name!r}]", arrays[part.name])
      if jnp.shape(x) != tuple(like.shape):
        raise ValueError(
          f"`{name}[{part.name!r}]` must have the shape of `like`, "
          f"{tuple(like.shape)}, got {core.shape_string(x)}."
        )
