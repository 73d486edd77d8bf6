"""Checks of the arrays that ops take, by shape and dtype alone.

They run while an op is traced and read no element.
"""

from typing import Any

import jax
import jax.numpy as jnp

from jaxmotion import core
from jaxmotion.core import PyTree, ShapedLike
from jaxmotion.kernels import _error_memory


def check_block(name: str, value: Any) -> Any:
  """Returns a number of elements that int32 can index, or raises."""
  return core.integer(1, 2**31 - 1)(name, value)


def check_words(
  name: str, x: Any, shape: tuple[int | str, ...], bits: int | None = None
) -> None:
  """Raises unless `x` is an array of machine words of a shape."""
  kind = "uint" if bits is None else f"uint{bits}"
  dtype = jnp.dtype(getattr(x, "dtype", bool))
  right = jnp.issubdtype(dtype, jnp.unsignedinteger)
  if not right or (bits is not None and dtype.itemsize * 8 != bits):
    raise TypeError(_describe(name, kind, shape, x))
  check_shape(name, x, shape, kind)


def check_shape(
  name: str, x: Any, shape: tuple[int | str, ...], kind: str
) -> None:
  """Raises unless an array has a shape."""
  wanted, found = shape, tuple(x.shape)
  if shape[-1:] == ("...",):
    wanted = shape[:-1]
    found = found[: len(wanted)]
  if len(found) != len(wanted) or any(
    isinstance(n, int) and n != m for n, m in zip(wanted, found, strict=True)
  ):
    raise ValueError(_describe(name, kind, shape, x))


def _describe(
  name: str, kind: str, shape: tuple[int | str, ...], x: Any
) -> str:
  found = core.shape_string(x) if hasattr(x, "dtype") else f"{x!r:.200}"
  axes = ",".join(map(str, shape))
  return f"`{name}` must be an array {kind}[{axes}], got {found}."


def check_key(key: core.Key | None, needs_key: bool) -> None:
  """Raises if there is no key where one is needed."""
  if needs_key and key is None:
    raise ValueError(
      "`key` must be a jaxmotion.Key for an op that draws random numbers, got "
      "None: make one with jaxmotion.make_key(seed)."
    )


def check_memory(
  x: ShapedLike, memory: _error_memory.ErrorMemory, sent: PyTree
) -> None:
  """Raises unless an error memory fits an array and its payload."""
  core.float_array("memory.value", memory.value)
  check_shape("memory.value", memory.value, tuple(x.shape), "float32")
  if jnp.shape(memory.count) != ():
    raise ValueError(
      f"`memory.count` must be one number, got {memory.count!r:.200}."
    )
  if jax.tree.leaves(memory.sent):
    check_payload("memory.sent", memory.sent, sent)


def check_payload(
  name: str, payload: Any, like: PyTree, *, workers: bool = False
) -> None:
  """Raises unless a payload has the structure, shapes and dtypes of another."""
  if not workers and core.same_shapes(payload, like):
    return
  found = jax.tree.map(_describe_leaf, payload)
  leaves = jax.tree.leaves(payload)
  lead: tuple[int, ...] = ()
  if workers and leaves:
    lead = tuple(getattr(leaves[0], "shape", ())[:1])
  expected = jax.tree.map(
    lambda a: core.shape_string(
      jax.ShapeDtypeStruct((*lead, *a.shape), a.dtype)
    ),
    like,
  )
  if found != expected or (workers and not any(lead)):
    rows = ", stacked along a leading axis of workers" if workers else ""
    raise ValueError(f"`{name}` must be {expected}{rows}, got {found!s:.400}.")


def _describe_leaf(leaf: Any) -> str:
  return core.shape_string(leaf) if hasattr(leaf, "dtype") else repr(leaf)
