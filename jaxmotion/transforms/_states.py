"""States of transformations and schemes, and what exchanges were made for.

They are here together, because steps look for them in any chain.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec

from jaxmotion import core
from jaxmotion.codecs import Codec
from jaxmotion.codecs.extend import check_codec
from jaxmotion.collectives.extend import StateLayout
from jaxmotion.core import Array, PyTree
from jaxmotion.transforms import _model_axes

Init = Callable[[PyTree, PyTree | None], Any]


class ExchangedLeaf(NamedTuple):
  """One array of the tree that an exchange is for."""

  path: str  # Place in the tree, such as `a/b/0`.
  shape: tuple[int, ...]
  dtype: str
  # Axes of the model that shard each dimension, up to the last that any shards.
  spec: tuple[tuple[str, ...], ...] = ()

  def __str__(self) -> str:
    spec = f" sharded {self.partition_spec}" if self.spec else ""
    return f"{self.dtype}{list(self.shape)}{spec}"

  @property
  def like(self) -> jax.ShapeDtypeStruct:
    """The shape and dtype of the array."""
    return jax.ShapeDtypeStruct(self.shape, jnp.dtype(self.dtype))

  @property
  def partition_spec(self) -> PartitionSpec:
    """The partition spec of the array over axes of the model."""
    return PartitionSpec(*(names or None for names in self.spec))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
  """Arguments of an exchange, and its tree: what its state depends on."""

  kind: ClassVar[str]

  axis_name: tuple[Any, ...] | core.HostAxes
  op: str = "mean"
  # Arrays of the tree, in its order; () before `init`.
  leaves: tuple[ExchangedLeaf, ...] = dataclasses.field(default=(), repr=False)
  # Specs that shard nothing are equal to none: `leaves` tell what is sharded.
  has_specs: bool = dataclasses.field(default=False, compare=False, repr=False)
  # These are None for options that a file held. Functions of two runs are never
  # equal. init: (parameters, specs) -> state.
  treedef: Any = dataclasses.field(default=None, compare=False, repr=False)
  init: Init | None = dataclasses.field(default=None, compare=False, repr=False)

  @property
  def codecs(self) -> tuple[Codec, ...]:
    """The codec of the gradients, for each level."""
    raise NotImplementedError

  @property
  def axes(self) -> set[Any]:
    """The axes of the workers and of the model."""
    return set(core.axis_names(self.axis_name)).union(
      *(names for leaf in self.leaves for names in leaf.spec)
    )

  @property
  def params(self) -> PyTree:
    """The shapes and dtypes of the tree."""
    return self.treedef.unflatten([leaf.like for leaf in self.leaves])

  @property
  def specs(self) -> PyTree | None:
    """The partition specs of the tree over axes of the model, or None."""
    if not self.has_specs:
      return None
    return self.treedef.unflatten([leaf.partition_spec for leaf in self.leaves])

  def shard_params(self, sizes: Mapping[str, int]) -> PyTree:
    """Returns the shapes of one device's shards of the tree."""
    # sizes: length of every axis of the mesh.

    def cut(leaf: ExchangedLeaf) -> jax.ShapeDtypeStruct:
      shape = list(leaf.shape)
      for i, names in enumerate(leaf.spec):
        shape[i] //= core.count_devices(names, sizes)
      return jax.ShapeDtypeStruct(shape, leaf.like.dtype)

    return self.treedef.unflatten(map(cut, self.leaves))

  def note_tree(self, params: PyTree, specs: PyTree | None) -> "Options":
    """Returns the options with the tree that they are for."""
    full = PartitionSpec() if specs is None else specs
    leaves = [
      ExchangedLeaf(path, tuple(x.shape), str(x.dtype), _list_axes(spec))
      for (path, x), spec in zip(
        core.named_leaves(params),
        jax.tree.leaves(_model_axes.spread_specs(full, params)),
        strict=True,
      )
    ]
    return dataclasses.replace(
      self,
      leaves=tuple(leaves),
      has_specs=specs is not None,
      treedef=jax.tree.structure(params),
    )


def _list_axes(spec: PartitionSpec) -> tuple[tuple[str, ...], ...]:
  """Returns the axes of each dimension, up to the last that any shards."""
  axes = tuple(map(core.spec_axes, spec))
  count = max((i + 1 for i, names in enumerate(axes) if names), default=0)
  return axes[:count]


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True, kw_only=True)
class ExchangeOptions(Options):
  """Arguments of one `exchange`, and the tree that it is for."""

  kind = "exchange"

  codec: Codec | tuple[Codec, ...]  # A tuple has one for each level.
  method: str | None

  @property
  def codecs(self) -> tuple[Codec, ...]:
    """The codec of every level."""
    return (self.codec,) if isinstance(self.codec, Codec) else self.codec

  def state_layout(self, sizes: Mapping[str, int]) -> StateLayout:
    """Returns how the devices of a mesh keep the states of arrays."""
    workers, devices = core.split_axes(self.axis_name)
    return StateLayout(
      self.codecs[0],
      core.count_devices(workers, sizes),
      self.method,
      core.count_devices(devices, sizes) if devices else None,
      canonical=not isinstance(self.codec, Codec),
    )


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True, kw_only=True)
class ShardedOptions(Options):
  """Arguments of one `sharded`, and the tree that it is for."""

  kind = "sharded"

  gradient_codec: Codec
  weight_codec: Codec | None  # That of the differences of weights.
  # The transformation inside; None for options that a file held.
  tx: optax.GradientTransformation | None = dataclasses.field(
    default=None, compare=False, repr=False
  )

  @property
  def codecs(self) -> tuple[Codec, ...]:
    """The codec of the gradients."""
    return (self.gradient_codec,)


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
    >>> state = transforms.bind_mesh(tx, mesh).init({"w": jnp.zeros((2, 8))})
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
    >>> params = jnp.zeros((8, 4), "bfloat16")
    >>> state = transforms.bind_mesh(tx, mesh).init(params)
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


any_codec = core.optional(functools.partial(check_codec, trees=True))
_EXCHANGES = (ExchangeState, ShardedState, FullyShardedState)
_COUNTED = (*_EXCHANGES, DelayedState, LocalState)
_SKIPPED = (*_EXCHANGES, SkipNonfiniteState)


def find_count(opt_state: PyTree) -> Array | None:
  """Returns the steps so far, int32[], as some state counts them, or None."""
  # That of an exchange comes first.
  counts = [node.count for node in core.find_nodes(opt_state, _COUNTED)]
  optax_counts = optax.tree.get_all_with_path(opt_state, "count")
  counts += [count for _, count in optax_counts if not jnp.shape(count)]
  return counts[0] if counts else None


def list_skipped(opt_state: PyTree) -> list[Array]:
  """Returns how many updates were skipped, int32[], by all that may skip."""
  return [node.skipped for node in core.find_nodes(opt_state, _SKIPPED)]


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


def state_of(cls: Any) -> core.Kind:
  """Makes the check of an argument that is a state of a class."""
  # A state of all workers in rows is of the class too, but has rows of counts.

  def check(name: str, state: Any) -> Any:
    core.instance(cls, "what `init` returned")(name, state)
    for count in [n for n in ("count", "skipped") if n in cls._fields]:
      if shape := jnp.shape(getattr(state, count)):
        raise ValueError(
          f"`{name}` must have a scalar `{count}`, got shape {shape}."
        )
    return state

  return check


def check_made_for(name: str, made_for: Any, wanted: Any, noun: str) -> None:
  """Raises, naming the field that differs, unless options are the same."""
  if made_for == wanted:
    return
  for field in dataclasses.fields(wanted):
    own, other = (getattr(one, field.name) for one in (wanted, made_for))
    if field.compare and own != other:
      raise ValueError(
        f"`{name}` must be made for the {field.name} of this {noun}, "
        f"{own!r:.200}, got one for {other!r:.200}: continue it by "
        "`checkpoint.resize`."
      )


def check_options(state: Any, cls: type, options: Options) -> None:
  """Raises unless a state was made for an exchange with these arguments."""
  state_of(cls)("state", state)
  if type(state.made_for) is not type(options):
    raise TypeError(
      "`state` must say what it was made for, as that of `init` does, got "
      f"{state.made_for!r:.200}."
    )
  # The arrays say by their shapes which tree they are for.
  options = dataclasses.replace(options, leaves=state.made_for.leaves)
  check_made_for("state", state.made_for, options, "exchange")


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


def as_transformation(name: str, tx: Any) -> optax.GradientTransformation:
  """Returns an optax transformation, also for an `optax.MultiSteps`."""
  if isinstance(tx, optax.MultiSteps):
    tx = tx.gradient_transformation()
  noun = "an optax transformation"
  return core.instance(optax.GradientTransformation, noun)(name, tx)


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
  return core.find_nodes(state, (ExchangeState, ShardedState))


def check_trained(params: PyTree) -> None:
  """Raises, naming the leaf, unless every parameter is floating-point."""
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
