"""Layout of one loop iteration's encoded residuals on device and host."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxmotion import core
from jaxmotion.core import Array, AxisName, PyTree
from jaxmotion.memory.residuals import choose


class HostBuffers:
  """Lays out one iteration's residuals: a device part and host buffers.

  Encoded buffers that go to the host are concatenated, to one host buffer for
  each dtype. XLA:GPU has at most two transfers under way, so of a dozen per
  iteration it waited for most. A loop carries the host buffers to its next
  iteration: they are sent while that one computes, and fetched while the
  iteration before computes. The cost is the memory of one more iteration's
  buffers.

  Args:
    residuals: residuals of an iteration, in the order of their buffers.
  """

  def __init__(self, residuals: Sequence[choose.Residual]):
    self._likes = [(r.buffers_like(), r.on_host) for r in residuals]
    # Parts that lie on several devices are not joined: that would move them.
    self._is_joined = [r.partition is None for r in residuals]
    self._sizes: dict[Any, int] = {}
    self._apart: list[jax.ShapeDtypeStruct] = []
    for (likes, on_host), joined in zip(
      self._likes, self._is_joined, strict=True
    ):
      for like in likes if on_host else ():
        if joined:
          self._sizes[like.dtype] = self._sizes.get(like.dtype, 0) + like.size
        else:
          self._apart.append(like)

  def __bool__(self) -> bool:
    """Whether any residual goes to the host."""
    return bool(self._sizes or self._apart)

  def zeros(self, varying_like: PyTree) -> list[Array]:
    """Returns host buffers of zeros, which the first iteration carries.

    Args:
      varying_like: arrays; where one varies over a mesh axis, the zeros do.
    """
    zeros = [jnp.zeros(n, dtype) for dtype, n in self._sizes.items()]
    zeros += [
      lax.full(like.shape, 0, like.dtype, sharding=like.sharding)
      for like in self._apart
    ]
    return core.to_varying(zeros, _varying_axes(varying_like))

  def pack(
    self, buffers: Sequence[choose.Buffers], varying_like: PyTree
  ) -> tuple[list[choose.Buffers], list[Array]]:
    """Separates the buffers that stay from those that go to the host.

    Args:
      buffers: encoded buffers of each residual.
      varying_like: arrays; where one varies over a mesh axis, the host buffers
        do.

    Returns:
      The buffers of the residuals that stay on the device, and one host
      buffer for each dtype, flat, then those on several devices. The host
      buffers are still on the device.
    """
    device: list[choose.Buffers] = []
    host: dict[Any, list[Array]] = {dtype: [] for dtype in self._sizes}
    apart: list[Array] = []
    for own, (_, on_host), joined in zip(
      buffers, self._likes, self._is_joined, strict=True
    ):
      if not on_host:
        device.append(own)
      elif joined:
        for a in own:
          host[a.dtype].append(a.reshape(-1))
      else:
        apart += own
    sent = [*(jnp.concatenate(parts) for parts in host.values()), *apart]
    return device, core.to_varying(sent, _varying_axes(varying_like))

  def unpack(self, host: Sequence[Array]) -> list[choose.Buffers]:
    """Returns the buffers of each offloaded residual from the host buffers."""
    apart = iter(host[len(self._sizes) :])
    remaining = dict(zip(self._sizes, host, strict=False))
    fetched: list[choose.Buffers] = []
    for (likes, on_host), joined in zip(
      self._likes, self._is_joined, strict=True
    ):
      if not on_host:
        continue
      if not joined:
        fetched.append([next(apart) for _ in likes])
        continue
      own = []
      for like in likes:
        flat, remaining[like.dtype] = jnp.split(
          remaining[like.dtype], [like.size]
        )
        own.append(flat.reshape(like.shape))
      fetched.append(own)
    return fetched

  def merge(
    self, device: Sequence[choose.Buffers], fetched: Sequence[choose.Buffers]
  ) -> list[choose.Buffers]:
    """Returns the buffers of all residuals, in their order; inverts `pack`.

    Args:
      device: buffers that stayed on the device, from `pack`.
      fetched: buffers that came back from the host, from `unpack`.
    """
    stayed, came_back = iter(device), iter(fetched)
    return [
      next(came_back if on_host else stayed) for _, on_host in self._likes
    ]


def _varying_axes(tree: PyTree) -> tuple[AxisName, ...]:
  """Returns the mesh axes over which any array of a tree varies."""
  axes = {a for leaf in jax.tree.leaves(tree) for a in core.varying_axes(leaf)}
  return tuple(sorted(axes, key=str))
