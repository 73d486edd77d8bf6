"""Derives how a tree is exchanged: as which arrays, by which collectives.

`jaxmotion.collectives` does the exchange; this module derives what it sends
from shapes alone, without a mesh of that many devices. The collectives say what
travels between workers (`plan_messages`, `schedule_rounds`). What the devices
of a host exchange first is written a second time here: tests trace the real
exchange and require the same ledger (tests/perfmodel/predict/test_exchange.py).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxmotion import codecs, core, wire
from jaxmotion.codecs.extend import partition
from jaxmotion.collectives.extend import (
  ArrayPlan,
  is_sharded,
  plan_arrays,
  plan_messages,
  row_like,
  schedule_rounds,
  shard_like,
)
from jaxmotion.core import PyTree, ShapedLike
from jaxmotion.perfmodel import platform

_COLLECTIVES = {
  "sum": "all_reduce",
  "max": "all_reduce",
  "gather": "all_gather",
  "all_to_all": "all_to_all",
}


class ExchangedArray(NamedTuple):
  """One array that is exchanged: a leaf, or several leaves packed together.

  Attributes:
    plan: codec and method of the array, or of a shard of it if the devices of a
      host reduce first.
    leaves: positions of its leaves in the tree.
    whole: shapes and dtypes of those leaves, before devices of a host cut them.
  """

  plan: ArrayPlan
  leaves: tuple[int, ...]
  whole: tuple[ShapedLike, ...]


class ExchangeLayout(NamedTuple):
  """Arrays and axes of the exchange of a tree.

  Attributes:
    arrays: exchanged arrays, in the order of the tree.
    hosts: axis of the hosts, or of the workers.
    devices: axis of the devices of one host, if they reduce first.
  """

  arrays: tuple[ExchangedArray, ...]
  hosts: platform.Axis
  devices: platform.Axis | None

  @property
  def ledger(self) -> wire.Ledger:
    """Collectives that each worker takes part in, with their bytes."""
    moves = _exchange_moves(self.arrays, self.hosts)
    if self.devices is None:
      return wire.Ledger(tuple(moves))
    leaves = [leaf for array in self.arrays for leaf in array.whole]
    before, after = _local_moves(leaves, self.devices)
    return wire.Ledger((*before, *moves, *after))


def make_layout(
  tree: PyTree,
  hosts: platform.Axis,
  codec: codecs.Codec | None,
  method: str | None,
  devices: platform.Axis | None,
) -> ExchangeLayout:
  """Returns the arrays that are exchanged, each with its codec and method."""
  core.check_choice("method", method, (None, "gather", "two_phase"))
  leaves = jax.tree.leaves(tree)
  if devices is not None:
    count = devices.workers
    tree = jax.tree.map(lambda a: shard_like(a, count), tree)
  split = partition(codecs.identity() if codec is None else codec, tree)
  plans = plan_arrays(split, hosts.workers, method)
  arrays = [
    ExchangedArray(plan, group.leaves, tuple(leaves[i] for i in group.leaves))
    for group, plan in zip(split.leaf_groups, plans, strict=True)
  ]
  return ExchangeLayout(tuple(arrays), hosts, devices)


def _exchange_moves(
  arrays: Sequence[ExchangedArray], axis: platform.Axis
) -> list[wire.Move]:
  """Returns the moves between workers, those of one round after another."""
  messages = [plan_messages(array.plan) for array in arrays]
  left = [iter(own) for own in messages]
  moves = []
  for kind, members in schedule_rounds(
    [[m.kind for m in own] for own in messages]
  ):
    payloads = [next(left[i]).payload for i in members]
    for dtype, nbytes in _sent_bytes(kind, payloads).items():
      move = wire.Move(
        _COLLECTIVES[kind], (axis.name,), axis.workers, dtype, nbytes, 1
      )
      moves.append(move)
  return moves


def _sent_bytes(kind: str, payloads: PyTree) -> dict[str, int]:
  """Returns the bytes that travel in one round, by the dtype they travel in."""
  found: dict[str, int] = {}
  for leaf in jax.tree.leaves(payloads):
    dtype = str(leaf.dtype) if _COLLECTIVES[kind] == "all_reduce" else "words"
    # Integer words of a sum (seeds, shared positions) are equal on all workers,
    # so they are not sent.
    if kind != "sum" or jnp.issubdtype(leaf.dtype, jnp.floating):
      found[dtype] = found.get(dtype, 0) + core.tree_bytes(leaf)
  return {dtype: nbytes for dtype, nbytes in found.items() if nbytes}


def _local_moves(
  likes: list[ShapedLike], axis: platform.Axis
) -> tuple[list[wire.Move], list[wire.Move]]:
  """Returns the moves within a host, before and after those between hosts."""

  def axis_move(op: str, nbytes: int) -> wire.Move:
    return wire.Move(op, (axis.name,), axis.workers, "float", nbytes, 1)

  def wide_bytes(like: ShapedLike) -> int:
    dtype = jnp.promote_types(like.dtype, jnp.float32)
    return math.prod(like.shape) * dtype.itemsize

  rows = [
    row_like(a, axis.workers) for a in likes if is_sharded(a, axis.workers)
  ]
  whole = [a for a in likes if not is_sharded(a, axis.workers)]
  before = [("reduce_scatter", axis.workers * sum(map(wide_bytes, rows)))]
  before.append(("all_reduce", sum(map(wide_bytes, whole))))
  # Every device of a host exchanges the leaves that are too small to cut.
  # Devices may round the same mean differently, so an all-reduce (of zeros
  # on all other devices) gives each of them the first device's result.
  after = [
    ("all_gather", core.tree_bytes(rows)),
    ("all_reduce", core.tree_bytes(whole)),
  ]
  return (
    [axis_move(*move) for move in before if move[1]],
    [axis_move(*move) for move in after if move[1]],
  )
