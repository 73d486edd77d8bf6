"""Plan of a fully sharded step: how its loss gathers weights in parts."""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AbstractMesh, Mesh, PartitionSpec as P

from jaxmotion import core, program
from jaxmotion.codecs import Codec
from jaxmotion.codecs.extend import fold_paths
from jaxmotion.collectives import extend
from jaxmotion.core import Array, AxisName, PyTree
from jaxmotion.transforms import _shard_layout, _states
from jaxmotion.transforms._schemes import _weight_part
from jaxmotion.transforms._shard_layout import LeafCut
from jaxmotion.transforms._step import _local_work
from jaxmotion.transforms._step._results import LocalWork, LossOptions
from jaxmotion.transforms._step._scheme import TrainState, Workers


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class FullyShardedOptions:
  """Choices of one `fully_sharded` that its state depends on."""

  axis_name: tuple[Any, ...]  # Those of all workers.
  workers: int
  error_feedback: bool
  hosts: int  # Number of workers, or hosts, with error memory; 0 without it.
  cuts: tuple[LeafCut, ...]


class GatherPlan(NamedTuple):
  """Arguments of `fully_sharded` that say how weights are gathered."""

  weight_codec: Codec | None
  gradient_codec: Codec | None
  local_codec: Codec | None
  error_feedback: bool
  regather: bool | str
  nonfinite: str
  stacked: core.PathRules[None]
  seed: int

  @property
  def codecs(self) -> dict[str, Codec | None]:
    """The codecs of what is sent, by the names of their arguments."""
    names = "weight_codec", "gradient_codec", "local_codec"
    return {name: getattr(self, name) for name in names}

  def is_stacked(self, path: str) -> bool:
    """Returns whether the first dimension of a leaf counts layers."""
    return self.stacked.first_match(path) is not None


@dataclasses.dataclass(frozen=True)
class ShardPlan(_shard_layout.CutTree):
  """Division of parameters between the workers of a step that gathers them."""

  options: GatherPlan
  axis_name: AxisName  # Those of all workers, or `HostAxes`.
  made_for: FullyShardedOptions

  def memory_specs(self) -> list[P]:
    """Returns the spec of the error memory of every leaf that is cut."""
    if not self.options.error_feedback:
      return []
    specs = self.select_cut(self.model.leaf_specs)
    return [P(self.axes, *spec) for spec in specs]

  def make_memory(self, parts: PyTree) -> list[Array]:
    """Returns one worker's empty error memory of the gradients of parts."""
    if not self.options.error_feedback:
      return []
    leaves = zip(self.cuts, jax.tree.leaves(parts), strict=True)
    # Axes of the model may be manual: then parts are shorter than leaves say.
    shapes = [
      cut._replace(shape=x.shape).shard_shape(self.made_for.hosts)
      for cut, x in self.select_cut(leaves)
    ]
    return [jnp.zeros(shape, jnp.float32) for shape in shapes]

  def state_specs(self, inner: core.Split) -> _states.FullyShardedState:
    """Returns the partition specs of a state with this optimizer's state."""
    count: Any = P()
    error = core.PerWorker(self.memory_specs())
    return _states.FullyShardedState(
      count, count, inner.specs(), error, self.made_for
    )

  def leaf_keys(self, count: Array) -> list[core.Key | None]:
    """Returns the key of every leaf; one for each layer of a stacked leaf."""
    codecs = self.options.codecs.values()
    if not any(codec is not None and codec.needs_key for codec in codecs):
      return [None] * len(self.paths)
    index = core.worker_index(self.axes)
    base = core.make_key(self.options.seed, index).fold(count)
    of_paths = fold_paths(base, self.paths)
    return [
      jax.vmap(key.fold)(jnp.arange(cut.shape[0]))
      if self.options.is_stacked(path)
      else key
      for path, cut, key in zip(self.paths, self.cuts, of_paths, strict=True)
    ]

  def make_flags(self) -> list[Array]:
    """Returns a zero for every leaf, whose gradient is NaN if the leaf's is."""
    # The list is empty unless updates may be skipped.
    if self.options.nonfinite != "skip":
      return []
    return [
      self._per_layer(path, cut, jnp.zeros(()))
      for path, cut in zip(self.paths, self.cuts, strict=True)
    ]

  def _per_layer(self, path: str, cut: LeafCut, x: Array) -> Array:
    """Returns a scalar for each layer of a stacked leaf that is cut."""
    if cut.is_cut and self.options.is_stacked(path):
      return jnp.broadcast_to(x, cut.shape[:1])
    return x

  def wrap_parts(
    self,
    parts: PyTree,
    errors: list[Array],
    flags: list[Array],
    factor: Array | None,
    keys: list[core.Key | None],
  ) -> PyTree:
    """Makes the parameters that the loss gets, as parts that it gathers."""
    # errors, flags: one for each leaf that is cut, and for each leaf. factor:
    # that of this worker's gradient in the mean.
    options = self.options
    codecs = [
      extend.find_leaf_codecs(name, codec, parts, stateless=True)
      for name, codec in options.codecs.items()
    ]
    memories, leaf_flags = iter(errors), iter(flags)
    nodes: list[PyTree] = []
    for x, key, path, cut, spec, weight, gradient, local in zip(
      jax.tree.leaves(parts),
      keys,
      self.paths,
      self.cuts,
      self.model.leaf_specs,
      *codecs,
      strict=True,
    ):
      own = None if factor is None else self._per_layer(path, cut, factor)
      guard = _weight_part.GradientGuard(own, next(leaf_flags, None))
      if cut.dimension is None:
        nodes.append(_weight_part.guard_gradient(x, guard, options.nonfinite))
        continue
      gather = _weight_part.GatherOptions(
        self.axis_name,
        cut.dimension - len(cut.shape),
        weight.codec,
        gradient.codec,
        None if options.local_codec is None else local.codec,
        options.regather,
        options.nonfinite,
        # Of the whole leaf: the axes of the model are not manual here.
        P(*spec, *[None] * (len(cut.shape) - len(spec))),
        cut.shape[cut.dimension] if cut.is_padded else None,
      )
      nodes.append(
        _weight_part.WeightPart(x, next(memories, None), key, guard, gather)
      )
    return jax.tree.unflatten(jax.tree.structure(parts), nodes)


def make_plan(
  options: GatherPlan,
  workers: Workers,
  params: PyTree,
  mesh: Mesh | AbstractMesh,
) -> ShardPlan:
  """Plans which dimension of each parameter the workers of a mesh cut."""
  axes, axis_name = workers.axis_name, workers.host_axes or workers.axis_name
  extend.check_local_codec(axis_name, options.local_codec)
  _weight_part.check_regather(options.regather, axis_name)
  count, senders = (
    core.count_devices(names, mesh.shape)
    for names in (axes, core.split_axes(axis_name)[0])
  )
  model = workers.shardings.model(params)

  def cut_leaf(path: str, x: Any, kept: list[int]) -> LeafCut:
    layers = [0] if options.is_stacked(path) else []
    return _shard_layout.cut_leaf(x, count, [*layers, *kept], longest=True)

  paths, cuts = _shard_layout.cut_leaves(params, model, cut_leaf)
  made_for = FullyShardedOptions(
    core.axis_names(axes),
    count,
    options.error_feedback,
    senders if options.error_feedback else 0,
    cuts,
  )
  return ShardPlan(axes, model, paths, cuts, options, axis_name, made_for)


def find_plan(
  options: GatherPlan, workers: Workers, state: TrainState
) -> ShardPlan:
  """Returns the division of parts and their optimizer's state, or raises."""
  name, params, held = "state/opt_state", state.params, state.opt_state
  core.instance(_states.FullyShardedState, "what `init` returned")(name, held)
  count = jax.ShapeDtypeStruct((), jnp.int32)
  core.check_like(f"{name}/count", held.count, count, "`init`")
  made_for = held.made_for
  core.instance(FullyShardedOptions, "that of `init`")(
    f"{name}/made_for", made_for
  )
  check_padded(params, made_for.cuts)
  whole = _shard_layout.map_cuts(
    lambda cut, x: jax.ShapeDtypeStruct(cut.shape, x.dtype),
    params,
    made_for.cuts,
  )
  plan = make_plan(options, workers, whole, workers.mesh)
  _states.check_made_for(name, made_for, plan.made_for, "step")
  return plan


def check_padded(params: PyTree, cuts: tuple[LeafCut, ...]) -> None:
  """Raises unless parameters have the shapes of all workers' parts together."""
  # Padding makes them larger than those of the model.
  named = core.named_leaves(params)
  shapes = [cut.shard_shape(scale=cut.workers) for cut in cuts]
  for (path, x), shape in zip(named, shapes, strict=False):
    if jnp.shape(x) != shape:
      place = "/".join(filter(None, ("state/params", path)))
      raise ValueError(
        f"`{place}` must have the shape {shape} of all workers' parts, as "
        f"`init` makes it of whole parameters, got {jnp.shape(x)}."
      )
  if len(named) != len(shapes):
    raise ValueError(
      f"`state/params` must have the {len(shapes)} leaves that `state` was made"
      f" for, got {len(named)}."
    )


def make_sharded_work(
  loss: LossOptions, plan: ShardPlan
) -> Callable[..., LocalWork]:
  """Makes the function that computes one worker's part of the gradient."""
  own_loss, microbatches = _local_work.make_own_loss(loss), loss.microbatches

  def compute_work(
    own: PyTree, model_state: PyTree, batch: PyTree, key: Any, trips: None
  ) -> LocalWork:
    """Computes the gradient of one worker's batch, microbatch by microbatch."""
    # The gradient is (grads, errors, flags): the mean's part of leaves that are
    # cut and the worker's own of others; new error memory; and for each leaf
    # NaN if this worker's gradient was not finite.
    assert trips is None  # `check_counts` refuses them.
    parts, count, memory = own
    errors = core.unpack_worker(memory)
    batches = _local_work.split_batch(batch, microbatches)
    weights, factors = _find_weights(loss, plan, batches)

    def add_microbatch(carry: PyTree, one: PyTree) -> tuple[PyTree, PyTree]:
      """Adds the gradient of a microbatch to the sums."""
      (sums, model_state, errors), (i, batch, weight, factor) = carry, one
      keys = plan.leaf_keys(count * microbatches + i)
      own_key = key
      if key is not None and microbatches > 1:
        own_key = jax.random.fold_in(key, i)

      def loss_of(parts: PyTree, errors: PyTree, flags: PyTree) -> PyTree:
        params = plan.wrap_parts(parts, errors, flags, factor, keys)
        return own_loss(params, model_state, batch, own_key)

      inputs = parts, errors, plan.make_flags()
      value_and_grad = jax.value_and_grad(
        _trace_gathered(loss_of, inputs, plan), argnums=(0, 1, 2), has_aux=True
      )
      (value, (new, aux)), (grads, changes, flags) = value_and_grad(*inputs)
      if weight is not None:
        new = _local_work.keep_unweighted(weight, new, model_state)
      errors = jax.tree.map(jnp.add, errors, changes)
      if microbatches > 1:
        grads = jax.tree.map(
          lambda s, g: s + g.astype(s.dtype) / microbatches, sums, grads
        )
      metrics = (value, aux) if loss.has_aux else value
      return (grads, new, errors), (metrics, flags)

    given = (jnp.arange(microbatches), batches, weights, factors)
    if microbatches == 1:
      (grads, model_state, errors), (metrics, flags) = add_microbatch(
        (None, model_state, errors), jax.tree.map(lambda a: a[0], given)
      )
    else:
      start = _local_work.make_sums(parts), model_state, errors
      (sums, model_state, errors), (metrics, flags) = lax.scan(
        add_microbatch, start, given
      )
      grads = jax.tree.map(lambda s, p: s.astype(p.dtype), sums, parts)
      metrics = _local_work.average_scalars(metrics, weights)
    weight = None if weights is None else weights.sum()
    return LocalWork(metrics, model_state, (grads, errors, flags), weight)

  return compute_work


def _find_weights(
  loss: LossOptions, plan: ShardPlan, batches: PyTree
) -> tuple[Array | None, Array | None]:
  """Returns float32[microbatches]: weights, and factors of the gradients."""
  # A factor is the microbatch's share of the mean over all workers.
  weight_fn = loss.weight_fn
  if weight_fn is None:
    return None, None
  weights = lax.map(
    lambda batch: _local_work.compute_weight(weight_fn, batch), batches
  )
  if plan.options.nonfinite == "zero":
    weights, _ = extend.apply_nonfinite_policy("zero", weights, plan.axes)
  mean = weights.mean()
  own = weights / jnp.where(mean == 0, 1, mean)
  factors = extend.apply_weight(own, mean, plan.axes, "mean")
  # A weight of 0 drops the gradient, whatever the mean is.
  return weights, jnp.where(weights == 0, 0, factors)


def _trace_gathered(
  loss_of: Callable[..., Any], inputs: tuple[PyTree, ...], plan: ShardPlan
) -> Callable[..., Any]:
  """Traces a loss; raises if it depends on a part that was not gathered."""
  # Such a loss would differ between workers, and nothing would average its
  # gradient. The caller's function may be slow to trace, so it runs once: its
  # jaxpr is checked first and then differentiated.
  closed, shapes = jax.make_jaxpr(loss_of, return_shape=True)(*inputs)
  # Each leaf counts as an axis over which its part differs, until a value is
  # named `GATHERED`.
  names = [
    frozenset([("part", path)] if cut.is_cut else [])
    for path, cut in zip(plan.paths, plan.cuts, strict=True)
  ]
  of_loss, *_ = program.find_varying(
    closed,
    [*names, *[frozenset()] * len(jax.tree.leaves(inputs[1:]))],
    frozenset().union(*names),
    frozenset([_weight_part.GATHERED]),
  )
  if of_loss:
    path = "/".join(filter(None, ("params", min(of_loss)[1])))
    raise ValueError(
      f"`loss_fn` must gather `{path}` before it computes with it, got a loss "
      "of this worker's part alone: call `gather_params` first."
    )
  run = core.jax_core.jaxpr_as_fun(closed)
  return lambda *inputs: jax.tree.unflatten(
    jax.tree.structure(shapes), run(*jax.tree.leaves(inputs))
  )
