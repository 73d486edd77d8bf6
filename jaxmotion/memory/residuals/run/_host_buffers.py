"""The words of one turn of a loop: what stays, and what goes to the host."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxmotion.core import Array, AxisName, PyTree, to_varying, varying_axes
from jaxmotion.memory.residuals.choose import Residual
from jaxmotion.memory.residuals.run._forward import Words


class HostBuffers:
  """Lays out the words of a turn.

  Those that go to the host are put end to end, an array for each dtype: XLA:GPU
  has two transfers under way at most, and of many waits for most. A loop that
  carries them sends them while its next turn computes, and fetches them while
  the turn before does.

  Args:
    kept: what the words are those of.
  """

  def __init__(self, kept: Sequence[Residual]):
    self._likes = [(r.buffers_like(), r.on_host) for r in kept]
    self._sizes: dict[Any, int] = {}
    for likes, host in self._likes:
      for like in likes if host else ():
        self._sizes[like.dtype] = self._sizes.get(like.dtype, 0) + like.size

  def __bool__(self) -> bool:
    """Whether there are any on the host."""
    return bool(self._sizes)

  def zeros(self, beside: PyTree) -> list[Array]:
    """Returns what goes to the host before there is anything.

    Args:
      beside: arrays; where one differs from worker to worker, this may.
    """
    zeros = [jnp.zeros(n, dtype) for dtype, n in self._sizes.items()]
    return to_varying(zeros, _axes(beside))

  def pack(
    self, words: Sequence[Words], beside: PyTree
  ) -> tuple[list[Words], list[Array]]:
    """Returns the words that stay, and what goes to the host.

    Args:
      words: of each residual.
      beside: as for `zeros`.
    """
    here: list[Words] = []
    there: dict[Any, list[Array]] = {dtype: [] for dtype in self._sizes}
    for own, (_, host) in zip(words, self._likes, strict=True):
      if not host:
        here.append(own)
        continue
      for a in own:
        there[a.dtype].append(a.reshape(-1))
    joined = [jnp.concatenate(parts) for parts in there.values()]
    return here, to_varying(joined, _axes(beside))

  def unpack(self, there: Sequence[Array]) -> list[Words]:
    """Returns the words of each residual that went to the host."""
    rest = dict(zip(self._sizes, there, strict=True))
    far: list[Words] = []
    for likes, host in self._likes:
      if not host:
        continue
      own = []
      for like in likes:
        flat, rest[like.dtype] = jnp.split(rest[like.dtype], [like.size])
        own.append(flat.reshape(like.shape))
      far.append(own)
    return far

  def merge(self, here: Sequence[Words], far: Sequence[Words]) -> list[Words]:
    """Returns the words of all residuals, in their order."""
    near, back = iter(here), iter(far)
    return [next(back if host else near) for _, host in self._likes]


def _axes(tree: PyTree) -> tuple[AxisName, ...]:
  axes = {a for leaf in jax.tree.leaves(tree) for a in varying_axes(leaf)}
  return tuple(sorted(axes, key=str))
