"""How a tree is exchanged: as which arrays, by which collectives."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxmotion.codecs import Codec, identity
from jaxmotion.codecs.extend import partition
from jaxmotion.collectives.extend import (
  choose_methods,
  is_cut,
  row_like,
  shard_like,
)
from jaxmotion.core import PyTree, ShapedLike, check_choice, tree_bytes
from jaxmotion.perfmodel.platform import Axis
from jaxmotion.wire import Ledger, Move


class Job(NamedTuple):
  """An array that is exchanged.

  Attributes:
    codec: encodes it.
    like: what is encoded, of one host's part if its devices reduce first.
    method: "sum", "gather" or "two_phase".
    leaves: positions of the leaves it is made of.
    whole: those leaves, as the devices of a host have them.
  """

  codec: Codec
  like: jax.ShapeDtypeStruct
  method: str
  leaves: tuple[int, ...]
  whole: tuple[ShapedLike, ...]


class ExchangeLayout(NamedTuple):
  """How a tree is exchanged.

  Attributes:
    jobs: its arrays, in the order of the tree.
    mesh_axis: the workers, or the hosts.
    local_axis: the devices of one host, if they reduce first.
  """

  jobs: tuple[Job, ...]
  mesh_axis: Axis
  local_axis: Axis | None

  @property
  def ledger(self) -> Ledger:
    """What each worker sends."""
    moves = _moves(self.jobs, self.mesh_axis)
    if self.local_axis is None:
      return Ledger(tuple(moves))
    leaves = [leaf for job in self.jobs for leaf in job.whole]
    before, after = _moves_within(leaves, self.local_axis)
    return Ledger((*before, *moves, *after))


def make_layout(
  tree: PyTree,
  mesh_axis: Axis,
  codec: Codec | None,
  method: str | None,
  local_axis: Axis | None,
) -> ExchangeLayout:
  """Returns the arrays that are exchanged, each with its codec and method."""
  check_choice("method", method, (None, "gather", "two_phase"))
  leaves = jax.tree.leaves(tree)
  if local_axis is not None:
    devices = local_axis.workers
    tree = jax.tree.map(lambda a: shard_like(a, devices), tree)
  cut = partition(identity() if codec is None else codec, tree)
  methods = choose_methods(cut, mesh_axis.workers, method)
  jobs = []
  for part, like, chosen in zip(
    cut.leaf_groups, cut.likes(), methods, strict=True
  ):
    if not part.codec.keeps_dtype:
      wide = jnp.promote_types(like.dtype, jnp.float32)
      like = jax.ShapeDtypeStruct(like.shape, wide)
    whole = tuple(leaves[i] for i in part.leaves)
    jobs.append(Job(part.codec, like, chosen, part.leaves, whole))
  return ExchangeLayout(tuple(jobs), mesh_axis, local_axis)


def _moves(jobs: Sequence[Job], axis: Axis) -> list[Move]:
  """What a worker sends: sums, rows of the first phase, a gather."""

  def move(op: str, dtype: str, nbytes: int) -> Move:
    return Move(op, (axis.name,), axis.workers, dtype, nbytes, 1)

  sums: dict[str, int] = {}
  rows = gathered = 0
  for codec, like, method, *_ in jobs:
    if method == "sum":
      for leaf in jax.tree.leaves(codec.payload_like(like)):
        # Words of summable payloads are the same everywhere: they stay.
        if jnp.issubdtype(leaf.dtype, jnp.floating):
          name = str(leaf.dtype)
          sums[name] = sums.get(name, 0) + tree_bytes(leaf)
    elif method == "gather":
      gathered += tree_bytes(codec.payload_like(like))
    else:
      row = tree_bytes(codec.payload_like(row_like(like, axis.workers)))
      rows += axis.workers * row
      gathered += row
  moves = [move("all_reduce", name, n) for name, n in sums.items()]
  if rows:
    moves.append(move("all_to_all", "words", rows))
  if gathered:
    moves.append(move("all_gather", "words", gathered))
  return moves


def _moves_within(
  likes: list[ShapedLike], axis: Axis
) -> tuple[list[Move], list[Move]]:
  """What the devices of a host send each other, before and after."""

  def move(op: str, nbytes: int) -> Move:
    return Move(op, (axis.name,), axis.workers, "float", nbytes, 1)

  def wide_bytes(like: ShapedLike) -> int:
    dtype = jnp.promote_types(like.dtype, jnp.float32)
    return math.prod(like.shape) * dtype.itemsize

  rows = [row_like(a, axis.workers) for a in likes if is_cut(a, axis.workers)]
  whole = [a for a in likes if not is_cut(a, axis.workers)]
  before = [("reduce_scatter", axis.workers * sum(map(wide_bytes, rows)))]
  before.append(("all_reduce", sum(map(wide_bytes, whole))))
  # Of what was not cut, all take what the first device has.
  after = [("all_gather", tree_bytes(rows)), ("all_reduce", tree_bytes(whole))]
  return [move(*m) for m in before if m[1]], [move(*m) for m in after if m[1]]
