"""Order of branches that send behind sums that were made before them.

XLA:CPU may run a sum in a branch beside another sum that it does not depend on.
Devices that begin with different ones wait for one another, and the process
ends in a crash. It orders all other sums by itself.
"""

import contextlib
import contextvars
from collections.abc import Iterator

import jax
import jax.numpy as jnp

from jaxmotion import core
from jaxmotion.core import Array, PyTree

_sums: contextvars.ContextVar[tuple[Array, ...]] = contextvars.ContextVar(
  "sums", default=()
)


@contextlib.contextmanager
def branch_after(sums: PyTree) -> Iterator[None]:
  """Lets branches that send, traced in this context, wait for sums.

  Args:
    sums: arrays that sums over workers made; others need no wait.
  """
  leaves = [
    x
    for x in jax.tree.leaves(sums)
    if jnp.issubdtype(x.dtype, jnp.floating) and x.size
  ]
  token = _sums.set((*_sums.get(), *leaves))
  try:
    yield
  finally:
    _sums.reset(token)


def waiting_scalars() -> list[Array]:
  """Returns the scalars among the sums that branches wait for now."""
  return [x for x in _sums.get() if not jnp.ndim(x)]


@contextlib.contextmanager
def branch_after_only(sums: PyTree) -> Iterator[None]:
  """Lets branches wait for these sums, and for no others.

  Inside of a map, arrays of its outside may not be read: the map takes them as
  arguments (`waiting_scalars`).

  Args:
    sums: arrays of the inside.
  """
  token = _sums.set(())
  try:
    with branch_after(sums):
      yield
  finally:
    _sums.reset(token)


def order_branch(index: Array) -> Array:
  """Returns the index or predicate of a branch that sends.

  It is computed after the sums of `branch_after`, and so is the branch.

  Args:
    index: int32[] or bool[].
  """
  for x in _sums.get():
    if index.dtype == bool:
      index = core.schedule_after(index.astype(jnp.int32), x) > 0
    else:
      index = core.schedule_after(index, x)
  return index
