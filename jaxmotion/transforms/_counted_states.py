"""States of an optimizer that count updates, and those that were skipped."""

import jax

from jaxmotion.core import Array, PyTree
from jaxmotion.transforms._exchange_state import DelayedState, ExchangeState
from jaxmotion.transforms._fully_sharded_plan import FullyShardedState
from jaxmotion.transforms._local_round import LocalState
from jaxmotion.transforms._sharded_update import ShardedState
from jaxmotion.transforms._skip_nonfinite import SkipNonfiniteState

_EXCHANGES = (ExchangeState, ShardedState, FullyShardedState)
_COUNTED = (*_EXCHANGES, DelayedState, LocalState)
_SKIPPED = (*_EXCHANGES, SkipNonfiniteState)


def list_counts(opt_state: PyTree) -> list[Array]:
  """Returns the number of steps of every exchange, int32[] each.

  Args:
    opt_state: state of an optimizer that exchanges gradients.
  """
  return [node.count for node in _list_nodes(opt_state, _COUNTED)]


def list_skipped(opt_state: PyTree) -> list[Array]:
  """Returns how many updates were skipped, int32[] of each that may skip some.

  Args:
    opt_state: state of an optimizer that exchanges gradients.
  """
  return [node.skipped for node in _list_nodes(opt_state, _SKIPPED)]


def _list_nodes(tree: PyTree, kinds: tuple[type, ...]) -> list[PyTree]:
  leaves = jax.tree.leaves(tree, is_leaf=lambda n: isinstance(n, kinds))
  return [node for node in leaves if isinstance(node, kinds)]
