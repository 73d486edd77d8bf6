"""States of transformations and schemes, and what they count.

They are here together, because steps look for them in any chain.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxmotion import core
from jaxmotion.core import Array, PyTree
from jaxmotion.transforms import _exchange, _skip_nonfinite


class ShardedState(NamedTuple):
  """State of the `sharded` transformation.

  Attributes:
    count: int32[], updates so far.
    skipped: int32[], updates that were skipped for a non-finite element.
    master: parameters in float32, each worker's part; empty without a
      `weight_codec`.
    inner: state of the wrapped transformation, of each worker's part.
    codec_state: state of the gradients' codec, each worker's own.
    made_for: arguments of `sharded`, and the parameters' shapes: static data,
      without arrays.

  Example:
    >>> import optax
    >>> from jaxmotion import codecs, transforms
    >>> mesh = jax.sharding.Mesh(jax.devices()[:1], ("data",))
    >>> tx = transforms.sharded(
    ...   "data", optax.adam(1e-3), weight_codec=codecs.uniform(bits=4)
    ... )
    >>> state = transforms.init_state(tx, jnp.zeros((8, 4), "bfloat16"), mesh)
    >>> state.master.value.dtype, state.count.tolist()
    (dtype('float32'), 0)
  """

  count: Array  # type: ignore[assignment]
  skipped: Array
  master: core.Split
  inner: core.Split
  codec_state: core.PerWorker
  made_for: Any = None


class FullyShardedState(NamedTuple):
  """State of a `fully_sharded` step.

  Attributes:
    count: int32[], updates so far.
    skipped: int32[], updates that were skipped for a non-finite element.
    inner: state of the optimizer, of each worker's part.
    error: error memory of each leaf that is cut, each worker's own; None
      without memory.
    made_for: how workers cut the parameters, whose true shapes it has: static
      data, without arrays.

  Example:
    >>> import optax
    >>> from jaxmotion import transforms
    >>> mesh = jax.sharding.Mesh(jax.devices()[:1], ("data",))
    >>> def loss_fn(params, batch):
    ...   return jnp.mean((batch @ transforms.gather_params(params)) ** 2)
    >>> scheme = transforms.fully_sharded(optax.adam(1e-3))
    >>> init, _ = transforms.make_train_step(loss_fn, scheme, mesh)
    >>> state = init(jnp.eye(4)).opt_state
    >>> int(state.count), [a.shape for a in jax.tree.leaves(state.inner)]
    (0, [(), (4, 4), (4, 4)])
  """

  count: Array  # type: ignore[assignment]
  skipped: Array
  inner: core.Split
  error: core.PerWorker
  made_for: Any = None


class LocalState(NamedTuple):
  """State of the scheme `local_updates`.

  Attributes:
    count: int32[], steps so far.
    skipped: int32[], fragments that were not sent because a worker's parameters
      were not finite.
    params: each worker's own parameters.
    inner: each worker's own state of the inner optimizer.
    outer: state of the outer chain for each fragment.
    flying: with a delay, what the anchor becomes when fragments land, and
      whether each was sent; otherwise `()`.
    weights: with a `weight_fn`, each worker's weight since each fragment was
      sent last, float32[fragments]; otherwise `()`.

  Example:
    >>> import optax
    >>> from jaxmotion import transforms
    >>> mesh = jax.sharding.Mesh(jax.devices()[:1], ("data",))
    >>> scheme = transforms.local_updates(
    ...   optax.sgd(0.1),
    ...   optax.chain(transforms.exchange("data"), optax.sgd(0.7)),
    ...   every=8,
    ... )
    >>> init, _ = transforms.make_train_step(
    ...   lambda w, x: jnp.mean((x - w) ** 2), scheme, mesh
    ... )
    >>> state = init(jnp.zeros(3))
    >>> state.params.shape, state.opt_state.params.value.shape  # agreed, own
    ((3,), (1, 3))
  """

  count: Array  # type: ignore[assignment]
  skipped: Array
  params: core.PerWorker
  inner: core.PerWorker
  outer: tuple[PyTree, ...]
  flying: PyTree
  weights: Any


_EXCHANGES = (
  _exchange.ExchangeState,
  ShardedState,
  FullyShardedState,
)
_COUNTED = (*_EXCHANGES, _exchange.DelayedState, LocalState)
_SKIPPED = (*_EXCHANGES, _skip_nonfinite.SkipNonfiniteState)


def find_count(opt_state: PyTree) -> Array | None:
  """Returns the steps so far, int32[], as an exchange or else any state counts
  them."""
  counts = [node.count for node in _list_nodes(opt_state, _COUNTED)]
  found = optax.tree.get_all_with_path(opt_state, "count")
  counts += [count for _, count in found if not jnp.shape(count)]
  return counts[0] if counts else None


def is_delayed(opt_state: PyTree) -> bool:
  """Returns whether gradients are applied one step late."""
  return bool(_list_nodes(opt_state, (_exchange.DelayedState,)))


def list_skipped(opt_state: PyTree) -> list[Array]:
  """Returns how many updates were skipped, int32[] of each that may skip
  some."""
  return [node.skipped for node in _list_nodes(opt_state, _SKIPPED)]


def _list_nodes(tree: PyTree, kinds: tuple[type, ...]) -> list[PyTree]:
  leaves = jax.tree.leaves(tree, is_leaf=lambda n: isinstance(n, kinds))
  return [node for node in leaves if isinstance(node, kinds)]
