"""States of transformations and schemes, and checks of where exchanges stand.

They are here together, because steps look for them in any chain.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxmotion import core
from jaxmotion.core import Array, PyTree


class ExchangeState(NamedTuple):
  """State of the `exchange` transformation.

  Attributes:
    count: int32[], updates so far.
    skipped: int32[], updates that were skipped for a non-finite element.
    codec_state: state of the codec (error memory), each worker's own.
    made_for: arguments of the exchange, and the shapes that it exchanges:
      static data, without arrays.

  Example:
    >>> from jaxmotion import codecs, transforms
    >>> tx = transforms.exchange("data", codecs.feedback(codecs.sign()))
    >>> mesh = jax.sharding.Mesh(jax.devices()[:1], ("data",))
    >>> state = transforms.init_state(tx, {"w": jnp.zeros((2, 8))}, mesh)
    >>> int(state.count), int(state.skipped)
    (0, 0)
    >>> {a.shape[0] for a in jax.tree.leaves(state.codec_state)}  # workers
    {1}
  """

  count: Array  # type: ignore[assignment]
  skipped: Array
  codec_state: core.PerWorker
  made_for: Any = None


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


class DelayedState(NamedTuple):
  """State of the wrapper `delayed`, which applies gradients one step late."""

  count: Array  # type: ignore[assignment]
  inner: PyTree
  # (gradients, weight) of the last step, each worker's own, which the next step
  # exchanges and applies. Before the first step they are zeros.
  pending: core.PerWorker


class PerWorkerState(NamedTuple):
  """State of the wrapper `per_worker`: each worker's own inner state."""

  inner: core.PerWorker


class SkipNonfiniteState(NamedTuple):
  """State of the wrapper `skip_nonfinite`, which counts skipped updates."""

  skipped: Array
  inner: PyTree


_EXCHANGES = (ExchangeState, ShardedState, FullyShardedState)
_COUNTED = (*_EXCHANGES, DelayedState, LocalState)
_SKIPPED = (*_EXCHANGES, SkipNonfiniteState)


def find_count(opt_state: PyTree) -> Array | None:
  """Returns the steps so far, int32[], as some state counts them, or None."""
  # That of an exchange comes first.
  counts = [node.count for node in _list_nodes(opt_state, _COUNTED)]
  found = optax.tree.get_all_with_path(opt_state, "count")
  counts += [count for _, count in found if not jnp.shape(count)]
  return counts[0] if counts else None


def is_delayed(opt_state: PyTree) -> bool:
  """Returns whether gradients are applied one step late."""
  return bool(_list_nodes(opt_state, (DelayedState,)))


def list_skipped(opt_state: PyTree) -> list[Array]:
  """Returns how many updates were skipped, int32[], by all that may skip."""
  return [node.skipped for node in _list_nodes(opt_state, _SKIPPED)]


def _list_nodes(tree: PyTree, kinds: tuple[type, ...]) -> list[PyTree]:
  leaves = jax.tree.leaves(tree, is_leaf=lambda n: isinstance(n, kinds))
  return [node for node in leaves if isinstance(node, kinds)]


def make_counts() -> tuple[Array, Array]:
  """Makes the counts of a fresh state: of updates, and of skipped ones."""
  # They are two arrays: a step that donates the state may not donate one twice.
  return jnp.zeros((), jnp.int32), jnp.zeros((), jnp.int32)


def count_update(state: Any, ok: Array | None) -> tuple[Array, Array]:
  """Returns the counts of a state after one more update."""
  # `ok`: bool[], whether the update was made; None if none is ever skipped.
  skipped = state.skipped
  if ok is not None:
    skipped = skipped + (1 - ok.astype(jnp.int32))
  return optax.safe_increment(state.count), skipped


def check_counts(state: Any, kind: Any) -> None:
  """Raises unless a state is of a class, and its counts are scalars."""
  core.check_instance("state", state, kind, "what `init` returned")
  for name in [n for n in ("count", "skipped") if n in kind._fields]:
    if jnp.shape(getattr(state, name)):
      raise ValueError(
        f"`state` must have a scalar `{name}`, got shape "
        f"{jnp.shape(getattr(state, name))}."
      )


_SOMETIMES = (
  "which runs it at some steps only: exchange first, and put the wrapper "
  "around what follows"
)
# Wrappers under which an exchange does not run, or is dropped, at some steps.
_WRAPPERS: dict[type, tuple[str, str]] = {
  optax.MultiStepsState: (
    "MultiSteps",
    "which runs it every mini-step and drops the result: put MultiSteps behind "
    "it, or accumulate within a step by "
    "make_train_step(..., microbatches=)",
  ),
  optax.ApplyIfFiniteState: (
    "apply_if_finite",
    "which lets each worker decide alone: use "
    "jaxmotion.skip_nonfinite(chain, axis_name) instead",
  ),
  optax.ConditionallyMaskState: ("conditionally_mask", _SOMETIMES),
  optax.ConditionallyTransformState: ("conditionally_transform", _SOMETIMES),
}


def as_transformation(
  tx: optax.GradientTransformation | optax.MultiSteps, name: str = "tx"
) -> optax.GradientTransformation:
  """Returns an optax transformation, also for an `optax.MultiSteps`."""
  if isinstance(tx, optax.MultiSteps):
    tx = tx.gradient_transformation()
  core.check_instance(
    name, tx, optax.GradientTransformation, "an optax transformation"
  )
  return tx


def check_placement(opt_state: PyTree) -> None:
  """Raises if an exchange is inside a wrapper that does not always run it."""
  for node in jax.tree.leaves(
    opt_state, is_leaf=lambda n: is_exchange(n) or type(n) in _WRAPPERS
  ):
    if type(node) in _WRAPPERS and find_exchanges(tuple(node)):
      name, remedy = _WRAPPERS[type(node)]
      raise ValueError(
        f"`tx` must have no exchange inside optax.{name}, {remedy}."
      )


def is_exchange(node: Any) -> bool:
  """Says whether a node is the state of an exchange."""
  return isinstance(node, ExchangeState | ShardedState)


def find_exchanges(state: PyTree) -> list[Any]:
  """Returns the states of exchanges inside of a state, in order."""
  return _list_nodes(state, (ExchangeState, ShardedState))


def check_trained(params: PyTree) -> None:
  """Raises unless every parameter can have a gradient."""
  for path, leaf in core.named_leaves(params):
    like = jax.ShapeDtypeStruct(jnp.shape(leaf), jnp.result_type(leaf))
    if not jnp.issubdtype(like.dtype, jnp.inexact):
      name = "/".join(filter(None, ("params", path)))
      raise TypeError(
        f"`{name}` must be a floating-point array, got "
        f"{core.shape_string(like)}: "
        "keep what has no gradient, such as counters and tables of integers, "
        "in the loss's closure or the model's state."
      )
