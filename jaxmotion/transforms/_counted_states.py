"""States of an optimizer that count updates, and those that were skipped."""

import jax

from jaxmotion.core import Array, PyTree
from jaxmotion.transforms import (
  _exchange_state,
  _fully_sharded_plan,
  _local_round,
  _sharded_update,
  _skip_nonfinite,
)

_EXCHANGES = (
  _exchange_state.ExchangeState,
  _sharded_update.ShardedState,
  _fully_sharded_plan.FullyShardedState,
)
_COUNTED = (*_EXCHANGES, _exchange_state.DelayedState, _local_round.LocalState)
_SKIPPED = (*_EXCHANGES, _skip_nonfinite.SkipNonfiniteState)


def list_counts(opt_state: PyTree) -> list[Array]:
  """Returns the number of steps of every exchange, int32[] each."""
  return [node.count for node in _list_nodes(opt_state, _COUNTED)]


def list_skipped(opt_state: PyTree) -> list[Array]:
  """Returns how many updates were skipped, int32[] of each that may skip
  some."""
  return [node.skipped for node in _list_nodes(opt_state, _SKIPPED)]


def _list_nodes(tree: PyTree, kinds: tuple[type, ...]) -> list[PyTree]:
  leaves = jax.tree.leaves(tree, is_leaf=lambda n: isinstance(n, kinds))
  return [node for node in leaves if isinstance(node, kinds)]
