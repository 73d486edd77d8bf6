"""Gradient exchange between workers as an optax transformation."""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.sharding import PartitionSpec

from jaxmotion import core, hosts
from jaxmotion.codecs import Codec, identity
from jaxmotion.codecs.extend import check_codec
from jaxmotion.collectives.extend import (
  NONFINITE_POLICIES,
  StateLayout,
  apply_nonfinite_policy,
  check_codecs,
  check_level_given,
  check_local_codec,
  check_weight,
  init_tree,
  keep_update,
  reduce_tree,
)
from jaxmotion.core import Array, AxisName, PyTree
from jaxmotion.transforms import _model_axes


class DelayedState(NamedTuple):
  """Optimizer state of a step that applies gradients one step late.

  Attributes:
    count: int32[], steps so far.
    inner: state of the optax chain.
    pending: (gradients, weight) of the last step, each worker's own, which the
      next step exchanges and applies. Before the first step they are zeros.

  Example:
    >>> import optax
    >>> from jaxmotion import transforms
    >>> tx = transforms.delayed(optax.chain(transforms.exchange("data")))
    >>> mesh = jax.sharding.Mesh(jax.devices()[:1], ("data",))
    >>> state = transforms.init_state(tx, jnp.zeros(3), mesh)
    >>> grads, weight = state.pending.value
    >>> grads.shape, weight is None  # One row for each worker.
    ((1, 3), True)
  """

  count: Array  # type: ignore[assignment]
  inner: PyTree
  pending: core.PerWorker


Init = Callable[[PyTree, PyTree | None], Any]


class ExchangedLeaf(NamedTuple):
  """One array of the tree that an exchange is for.

  Attributes:
    path: place in the tree, such as `a/b/0`.
    spec: axes of the model that shard each dimension, up to the last dimension
      that any axis shards.
  """

  path: str
  shape: tuple[int, ...]
  dtype: str
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
  """Arguments of one exchange, and the tree that it is for.

  Attributes:
    axis_name: the workers' axes, as a tuple or `HostAxes`.
    op: "mean" or "sum" over workers.
    leaves: arrays of the tree, in its order; () before `init`.
    has_specs: whether something said how axes of the model shard the tree.
    treedef: structure of the tree; None for options that a file held.
    init: (parameters, specs) -> state; None for options that a file held.
  """

  kind: ClassVar[str]

  axis_name: tuple[Any, ...] | core.HostAxes
  op: str = "mean"
  leaves: tuple[ExchangedLeaf, ...] = dataclasses.field(default=(), repr=False)
  # Specs that shard nothing are equal to none: `leaves` tell what is sharded.
  has_specs: bool = dataclasses.field(default=False, compare=False, repr=False)
  treedef: Any = dataclasses.field(default=None, compare=False, repr=False)
  # Functions of two runs are never equal.
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
        shape[i] //= count_devices(names, sizes)
      return jax.ShapeDtypeStruct(shape, leaf.like.dtype)

    return self.treedef.unflatten(map(cut, self.leaves))


def count_devices(axis_name: AxisName, sizes: Mapping[str, int]) -> int:
  """Returns the number of devices along some axes of a mesh."""
  return math.prod(sizes[name] for name in core.axis_names(axis_name))


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True, kw_only=True)
class ExchangeOptions(Options):
  """Arguments of one `exchange`, and the tree that it is for.

  Attributes:
    codec: the codec, or a tuple with one for each level.
  """

  kind = "exchange"

  codec: Codec | tuple[Codec, ...]
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
      count_devices(workers, sizes),
      self.method,
      count_devices(devices, sizes) if devices else None,
      canonical=not isinstance(self.codec, Codec),
    )


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True, kw_only=True)
class ShardedOptions(Options):
  """Arguments of one `sharded`, and the tree that it is for.

  Attributes:
    weight_codec: codec of the differences, or None.
    tx: the transformation inside; None for options that a file held.
  """

  kind = "sharded"

  gradient_codec: Codec
  weight_codec: Codec | None
  tx: optax.GradientTransformation | None = dataclasses.field(
    default=None, compare=False, repr=False
  )

  @property
  def codecs(self) -> tuple[Codec, ...]:
    """The codec of the gradients."""
    return (self.gradient_codec,)


def note_options(
  state: Any, options: Options, params: PyTree, specs: PyTree | None
) -> Any:
  """Returns a fresh state that says what it was made for."""
  core.know_in_flax(type(options))
  full = PartitionSpec() if specs is None else specs
  named = zip(
    core.named_leaves(params),
    jax.tree.leaves(_model_axes.spread_specs(full, params)),
    strict=True,
  )
  made_for = dataclasses.replace(
    options,
    leaves=tuple(
      ExchangedLeaf(path, tuple(x.shape), str(x.dtype), _list_axes(spec))
      for (path, x), spec in named
    ),
    has_specs=specs is not None,
    treedef=jax.tree.structure(params),
  )
  return state._replace(made_for=made_for)


def _list_axes(spec: PartitionSpec) -> tuple[tuple[str, ...], ...]:
  """Returns the axes of each dimension, up to the last that any shards."""
  axes = tuple(map(core.spec_axes, spec))
  count = max((i + 1 for i, names in enumerate(axes) if names), default=0)
  return axes[:count]


def check_made_for(name: str, made_for: Any, wanted: Any, noun: str) -> None:
  """Raises unless a state was made for certain options, by what differs."""
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


def check_options(state: Any, kind: type, options: Options) -> None:
  """Raises unless a state was made for an exchange with these arguments."""
  check_counts(state, kind)
  if type(state.made_for) is not type(options):
    raise TypeError(
      "`state` must say what it was made for, as that of `init` does, got "
      f"{state.made_for!r:.200}."
    )
  # The arrays say by their shapes which tree they are for.
  options = dataclasses.replace(options, leaves=state.made_for.leaves)
  check_made_for("state", state.made_for, options, "exchange")


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


def check_counts(state: Any, kind: type) -> None:
  """Raises unless a state is of a class, and its counts are scalars."""
  core.check_instance("state", state, kind, "what `init` returned")
  for name in ("count", "skipped"):
    if jnp.shape(getattr(state, name)):
      raise ValueError(
        f"`state` must have a scalar `{name}`, got shape "
        f"{jnp.shape(getattr(state, name))}."
      )


def exchange(
  axis_name: AxisName,
  codec: Codec | Sequence[Codec] | None = None,
  *,
  op: str = "mean",
  method: str | None = None,
  nonfinite: str = "propagate",
  seed: int = 0,
  local_codec: Codec | None = None,
  start: int = 0,
  schedule: Callable[[Array], Array] | None = None,
) -> optax.GradientTransformationExtraArgs:
  r"""Replaces each worker's gradients by their mean, through a codec.

  First in a chain, it makes an optimizer data-parallel:

  .. math::
    g \leftarrow \frac{1}{N} \sum_{r} decode(encode(g_r))

  Use it inside `shard_map` or `pmap` with the axis bound. In a test without
  devices, `jax.vmap(..., axis_name=...)` binds one too. Take gradients that are
  still each worker's own: see `local_value_and_grad`. Wrap what comes before it
  and has state in `per_worker`. Put it inside `optax.partition` and
  `optax.masked`, where frozen leaves then send nothing, but outside of
  `optax.MultiSteps` and `optax.apply_if_finite`, which run it at some steps.

  Args:
    axis_name: the workers' axis, or a tuple of axes. With `HostAxes` devices of
      a host exchange first, at full precision. Each then sends its shard of the
      host's gradient to other hosts through the codec; see
      `collectives.all_reduce`. Give the same `HostAxes` to `make_train_step`,
      `state_specs` and `skip_nonfinite`.
    codec: codec of the payloads; None is `codecs.identity()`, which is
      `lax.pmean`. A sequence has one codec for each level: each update then
      takes `level=`, an int32[] equal on all workers, and sends only that
      codec's payloads. See also `schedule`.
    op: "mean" or "sum" over workers.
    method: "gather" or "two_phase"; None chooses by the number of workers. A
      codec of rounds, such as `low_rank`, has messages of its own.
    nonfinite: policy for gradients, and weights, that are not finite on some
      worker. "propagate": the element reaches every worker, unless its codec
      does not send it, and a weight makes all elements NaN. "skip": all workers
      agree to emit zeros and to keep their error memory as it was; see also
      `skip_nonfinite`. "zero": the element or weight is replaced by zero.
    seed: seed of stochastic rounding and sampling, in [0, 2^32). With the step,
      the leaf's path and the worker it determines every random bit.
    local_codec: codec within a host; None is full precision.
    start: number of updates that exchange at full precision first, and leave
      the codec's state as it is. Early gradients change fast, so that what an
      error memory keeps of them is soon out of date.
    schedule: level of each update, for a sequence of codecs: from the number of
      updates so far, int32[], to int32[]. `update` then takes no `level=`.

  Returns:
    A transformation whose `update` also takes `weight=`, this worker's scalar
    weight in the mean, and `level=` for a sequence of codecs. By `sending=`
    `make_train_step` tells it how the step sends; a wrapper of your own hands
    on all of these. If the codec has state, `init` has to run inside
    `shard_map` or `pmap`; `make_train_step` does so.

  Raises:
    TypeError: an argument of another type, such as a `codec` that is none.
    ValueError: a `seed` outside [0, 2^32); an unknown `op`, `method` or
      `nonfinite`; a `local_codec` without hosts. `update` raises it for a
      gradient that JAX has summed already, in a `shard_map` that checks types.

  Example:
    >>> import optax
    >>> from jaxmotion import codecs
    >>> tx = optax.chain(
    ...   exchange("data", codecs.feedback(codecs.uniform(bits=4))),
    ...   optax.adamw(3e-4),
    ... )
  """
  workers = core.flatten_axes("axis_name", axis_name)
  if local_codec is not None:
    check_codec("local_codec", local_codec, trees=True)
  check_local_codec(axis_name, local_codec)
  core.check_int("seed", seed, 0, 2**32 - 1)
  core.check_int("start", start, 0, 2**31 - 1)
  codec = identity() if codec is None else codec
  check_schedule(schedule, codec)
  if not isinstance(codec, Codec):
    check_codecs("codec", codec)
    codec = tuple(codec)
  core.check_choice("op", op, ("mean", "sum"))
  core.check_choice("method", method, (None, "gather", "two_phase"))
  core.check_choice("nonfinite", nonfinite, NONFINITE_POLICIES)
  one = _Exchange(
    axis_name,
    codec,
    op,
    method,
    nonfinite,
    seed,
    local_codec,
    start,
    workers,
  )
  init_mapped, update_mapped = _model_axes.map_model_axes(
    one.init, one.update, one.workers, one.codecs
  )

  def make_state(params: PyTree, specs: PyTree | None) -> ExchangeState:
    state = init_mapped(params, specs)
    return note_options(state, options, params, specs)

  def init_fn(params: PyTree) -> ExchangeState:
    core.check_arrays("params", params, numbers=False)
    return make_state(params, None)

  options = ExchangeOptions(
    axis_name=core.comparable_axes(axis_name),
    codec=codec,
    op=op,
    method=method,
    init=make_state,
  )

  def update_fn(
    updates: PyTree,
    state: ExchangeState,
    params: PyTree | None = None,
    *,
    weight: Any = None,
    level: Any = None,
    sending: hosts.Sending | None = None,
    **extra_args: Any,
  ) -> tuple[PyTree, ExchangeState]:
    del extra_args
    core.check_arrays("params", params)
    core.check_arrays("updates", updates, numbers=False)
    check_options(state, ExchangeState, options)
    check_weight(weight)
    if schedule is not None and level is not None:
      raise ValueError(
        "`level` must not be given to `update` of an exchange that has a "
        f"schedule of it, got {level!r}."
      )
    level = level if schedule is None else schedule(state.count)
    check_level_given(level, codec)
    sending = hosts.check_sending(sending)
    args = {"weight": weight, "level": level, "sending": sending}
    made_for = state.made_for
    state = state._replace(made_for=None)
    updates, state = update_mapped(updates, state, None, args, made_for.specs)
    return updates, state._replace(made_for=made_for)

  return optax.GradientTransformationExtraArgs(init_fn, update_fn)


class _Exchange(NamedTuple):
  """Arguments of one `exchange`, and what one device does."""

  axis_name: AxisName
  codec: Codec | tuple[Codec, ...]
  op: str
  method: str | None
  nonfinite: str
  seed: int
  local_codec: Codec | None
  start: int
  workers: AxisName

  @property
  def codecs(self) -> tuple[Codec, ...]:
    """The codec of every level."""
    return (self.codec,) if isinstance(self.codec, Codec) else self.codec

  @property
  def needs_key(self) -> bool:
    """Whether a codec may make random choices."""
    return self.local_codec is not None or any(
      codec.is_tree or codec.needs_key for codec in self.codecs
    )

  def init(self, params: PyTree, model: _model_axes.ModelAxes) -> ExchangeState:
    """Returns the state of one device's shards."""
    del model
    states = init_tree(params, self.axis_name, self.codec, self.method)
    return ExchangeState(*make_counts(), core.pack_worker(states))

  def update(
    self,
    updates: PyTree,
    state: ExchangeState,
    params: None,
    args: dict[str, Any],
    model: _model_axes.ModelAxes,
  ) -> tuple[PyTree, ExchangeState]:
    """Exchanges one device's shards."""
    del params
    sending = args["sending"]
    check_local(updates, self.workers)
    # All shards of a model are skipped, or none.
    axes = (*core.axis_names(self.workers), *model.names)
    (x, weight), ok = apply_nonfinite_policy(
      self.nonfinite, (updates, args["weight"]), axes
    )
    if ok is not None and (self.start or not isinstance(self.codec, Codec)):
      # XLA:CPU would run the agreement's sum beside sums in a branch, and may
      # end in a crash: what is sent waits for it.
      x = jax.tree.map(lambda a: jnp.where(ok, a, 0), x)
    old = core.unpack_worker(state.codec_state)
    key = None
    if self.needs_key:
      key = core.make_key(self.seed, core.worker_index(self.workers))
      key = key.fold(state.count)
    options = dict(key=key, weight=weight, sending=sending)

    def reduce_plainly(x: PyTree, old: PyTree) -> tuple[PyTree, PyTree]:
      y, _ = self._reduce(identity(), x, None, None, options)
      return core.to_varying_like(y, x, self.workers), old

    def reduce_coded(x: PyTree, old: PyTree) -> tuple[PyTree, PyTree]:
      y, new = self._reduce(self.codec, x, old, args["level"], options)
      return core.to_varying_like(y, x, self.workers), new

    if self.start:
      # The branch is around the collective: only one of both sends. The count
      # is equal on all workers.
      is_early = sending.order_branch(state.count) < self.start
      y, new = lax.cond(is_early, reduce_plainly, reduce_coded, x, old)
    else:
      y, new = self._reduce(self.codec, x, old, args["level"], options)
    y, new = keep_update(ok, y, new, old)
    return y, ExchangeState(*count_update(state, ok), core.pack_worker(new))

  def _reduce(
    self,
    codec: Codec | tuple[Codec, ...],
    x: PyTree,
    old: PyTree | None,
    level: Any,
    options: dict[str, Any],
  ) -> tuple[PyTree, PyTree]:
    """Returns the mean of a tree over workers, and the codec's new state."""
    return reduce_tree(
      x,
      self.axis_name,
      codec,
      state=old,
      op=self.op,
      method=self.method,
      level=level,
      local_codec=self.local_codec,
      **options,
    )


def check_schedule(schedule: Any, codec: Any) -> None:
  """Raises unless a schedule of levels is a function, for several codecs."""
  if schedule is None:
    return
  core.check_callable("schedule", schedule)
  if isinstance(codec, Codec):
    raise ValueError(
      "`schedule` must be None for one codec, got one: give `codec` a list "
      "with one codec for each level."
    )


def check_local(updates: PyTree, workers: AxisName) -> None:
  """Raises an error if gradients are typed as equal on all workers."""
  # JAX has summed such a gradient already. `pmap` and maps with
  # `check_vma=False` give no types, so nothing is known there.
  if not core.is_varying(core.worker_index(workers), workers):
    return
  for path, leaf in core.named_leaves(updates):
    if equal := sorted(set(core.axis_names(workers)) - core.varying_axes(leaf)):
      raise ValueError(
        f"`updates/{path}` must be a worker's own gradient, got one that is"
        f" equal on all workers of {', '.join(map(repr, equal))}: JAX has"
        " summed it at full precision, or another exchange has averaged it."
        " Take gradients by `jaxmotion.local_value_and_grad` instead of"
        " `jax.grad`, or run the step by `jaxmotion.parallelize_step`; put one"
        " exchange in a chain."
      )
