"""Scheme whose parameters and optimizer are sharded over workers."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding, PartitionSpec as P

from jaxmotion import codecs, collectives, core
from jaxmotion.collectives import extend
from jaxmotion.core import Array, PyTree
from jaxmotion.transforms import _shard_layout, _states
from jaxmotion.transforms._schemes import _gather_plan
from jaxmotion.transforms._shard_layout import LeafCut
from jaxmotion.transforms._step import _results, _scheme
from jaxmotion.transforms._step._scheme import Scheme, TrainState, Workers


@core.declare(
  tx=_states.as_transformation,
  weight_codec=_states.any_codec,
  gradient_codec=_states.any_codec,
  local_codec=_states.any_codec,
  regather=core.choice((True, False, "local")),
  error_feedback=core.boolean,
  nonfinite=core.choice(extend.NONFINITE_POLICIES),
  seed=core.seed,
)
def fully_sharded(
  tx: optax.GradientTransformation | optax.MultiSteps,
  *,
  weight_codec: codecs.Codec | None = None,
  gradient_codec: codecs.Codec | None = None,
  error_feedback: bool = False,
  local_codec: codecs.Codec | None = None,
  regather: bool | str = True,
  stacked: str | None = None,
  nonfinite: str = "propagate",
  seed: int = 0,
) -> Scheme:
  """Makes the scheme of parameters that are sharded over workers (ZeRO-3).

  Each worker keeps a part of the parameters, of the gradient and of the
  optimizer's state. The loss function gathers whole weights block by block,
  through `weight_codec`; their gradient is reduced to parts through
  `gradient_codec`.

  With hosts of several devices, give `make_train_step` the axes as `HostAxes`.
  Parameters are then cut host by host, payloads cross to another host once, and
  gradients are averaged within the host first. `regather="local"` keeps what a
  device got from other hosts, so the backward pass sends nothing between hosts
  but gradients (hpZ).

  A leaf is cut along its longest dimension that the workers divide. Without
  one, it is cut along its longest dimension and padded with zeros, so its part
  of `state.params` has the padded shape: `read_params(state)` returns
  parameters to evaluate and to save. Leaves of fewer than 64 elements per
  worker stay whole; their gradients are averaged at full precision.

  Leaves of the `params` that `loss_fn` gets are `extend.WeightPart` if they are
  cut: make arrays of them by `gather_params`, or wrap blocks in `gather_block`.
  With `microbatches`, each part gathers weights and reduces its gradient, so
  bytes grow with it: a whole gradient is never in memory.

  Args:
    tx: optimizer that treats every element by itself, as for `sharded`.
    weight_codec: codec of weights, without state; None is full precision.
    gradient_codec: codec of gradients, without state; None is full precision.
    error_feedback: whether each worker remembers what encodings of its gradient
      left out. The memory is float32 of the size of all parameters, divided by
      the devices of a host if there are hosts.
    local_codec: codec of gradients within a host, without state; None is full
      precision.
    regather: what the backward pass of a `gather_block` gathers again. True:
      all its weights; nothing is kept. "local": from the devices of its host
      alone. A device keeps the words that it got from other hosts. Their size
      is that of the payload divided by the devices of a host. False: nothing; a
      device keeps the words of all weights.
    stacked: regular expression for paths of leaves whose first dimension counts
      the layers of a `lax.scan`; that dimension is not cut.
    nonfinite: policy for gradients, and weights, that are not finite on some
      worker: "propagate", "skip" (all workers agree to keep parameters,
      moments, error memory and floating-point model state as they were) or
      "zero".
    seed: seed of stochastic rounding and sampling, in [0, 2^32).

  Returns:
    A scheme for `make_train_step`. `state.params` are ordinary arrays of the
    parameters' shapes, but for padding, cut over the workers;
    `state.opt_state` is a `FullyShardedState`.

  Raises:
    TypeError: an argument of another type.
    ValueError: a codec has state or joins leaves. `stacked` is no regular
      expression, or `nonfinite` is unknown. `init` raises it for a `stacked`
      that matches no leaf, for a `tx` with an exchange, and for a `local_codec`
      or `regather="local"` without `HostAxes`. `step` raises it for
      a `tx` that looks across elements, and for a `loss_fn` that uses a part by
      itself.

  Example:
    >>> from jaxmotion import transforms
    >>> mesh = jax.sharding.Mesh(jax.devices()[:1], ("data",))
    >>> block = transforms.gather_block(lambda w, x: jnp.tanh(x @ w))
    >>> def loss_fn(params, batch):
    ...   return jnp.mean(block(params, batch) ** 2)
    >>> init, step = transforms.make_train_step(
    ...   loss_fn, fully_sharded(optax.adam(1e-3)), mesh
    ... )
    >>> state, loss = step(init(jnp.eye(8)), jnp.zeros((4, 8)))
    >>> state.params.shape, float(loss)
    ((8, 8), 0.0)

  References:
    Rajbhandari et al., *ZeRO*, 2019; Wang et al., *ZeRO++*, 2023.
  """
  options = _gather_plan.GatherPlan(
    weight_codec,
    gradient_codec,
    local_codec,
    error_feedback,
    regather,
    nonfinite,
    core.PathRules([] if stacked is None else [(stacked, None)], "stacked"),
    seed,
  )
  return FullySharded(optax.with_extra_args_support(tx), options)


@dataclasses.dataclass(frozen=True)
class FullySharded(Scheme):
  """Scheme of parameters that `fully_sharded` divides between workers."""

  tx: optax.GradientTransformationExtraArgs  # That of a worker's part.
  options: _gather_plan.GatherPlan
  plan: Any = None  # The division of the parameters, after `bind`.
  counts_refusal = (
    "workers of a fully sharded step gather weights together in each microbatch"
  )

  def bind(self, workers: Workers, state: TrainState) -> "FullySharded":
    """Returns the scheme with the division of this state, or raises."""
    plan = _gather_plan.find_plan(self.options, workers, state)
    return dataclasses.replace(self, plan=plan)

  def init(self, workers: Workers, params: PyTree) -> PyTree:
    """Makes a worker's state of whole parameters, on any mesh."""
    mesh = jax.sharding.get_abstract_mesh()
    plan = _gather_plan.make_plan(self.options, workers, params, mesh)
    parts = _shard_layout.map_cuts(
      lambda cut, x: cut.own_part(x, plan.axes), params, plan.cuts
    )
    return self._init_parts(plan, parts)

  def _init_parts(
    self, plan: _gather_plan.ShardPlan, parts: PyTree
  ) -> _states.FullyShardedState:
    """Makes the optimizer state and error memory of this worker's parts."""
    core.know_in_flax(type(plan.made_for))
    memory = core.to_varying(plan.make_memory(parts), plan.axes)
    return _states.FullyShardedState(
      *_states.make_counts(),
      plan.init(self.tx, parts),
      core.pack_worker(memory),
      plan.made_for,
    )

  def start(self, workers: Workers, params: PyTree) -> tuple[PyTree, PyTree]:
    """Cuts parameters on the mesh, and makes the state of their parts."""
    params, mesh = jax.tree.map(jnp.asarray, params), workers.mesh
    plan = _gather_plan.make_plan(self.options, workers, params, mesh)
    self.options.stacked.require_use(plan.paths)
    params = _shard_layout.map_cuts(
      lambda cut, x: cut.pad_leaf(x), params, plan.cuts
    )
    specs = plan.split(params).specs().value

    def run_sharded(fun: Any, specs: PyTree, params: PyTree) -> PyTree:
      """Runs a jitted function whose results have these specs on the mesh."""
      shardings = jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs)
      return jax.jit(fun, out_shardings=shardings)(params)

    def copy_params(params: PyTree) -> PyTree:
      # A weak type would not last: `step` would be compiled again.
      return jax.tree.map(lambda a: jnp.copy(a.astype(a.dtype)), params)

    init_own = functools.partial(self._init_parts, plan)
    on_mesh = core.put_on_mesh(params, mesh, specs)
    params = run_sharded(copy_params, specs, on_mesh)
    maps: dict[str, Any] = {"mesh": mesh, "in_specs": (specs,)}
    shapes = core.eval_shape_in_map(init_own, maps, params)
    if exchanges := _states.find_exchanges(shapes.inner.value):
      raise ValueError(
        "`tx` must have no exchange, because `fully_sharded` reduces gradients "
        f"through its own codecs, got one with {type(exchanges[0]).__name__}."
      )
    state_specs = plan.state_specs(shapes.inner)
    make_state = jax.shard_map(init_own, out_specs=state_specs, **maps)
    return params, run_sharded(make_state, state_specs, params)

  def params(self, workers: Workers, state: Any) -> PyTree:
    """Returns this worker's parts; `make_compute` lets the loss gather them."""
    return state[0]

  def own(self, state: TrainState) -> PyTree:
    """Selects parts, the number of updates and error memory."""
    return state.params, state.opt_state.count, state.opt_state.error

  def layout(self, workers: Workers, state: TrainState) -> _scheme.Layout:
    """Tells the step how its arrays are sharded: each worker has a part."""
    plan, params = self.plan, self.plan.split(state.params)
    grads = workers.shardings.grads(state.params)
    return _scheme.Layout(
      params.specs().value,
      plan.state_specs(state.opt_state.inner),
      (grads, plan.memory_specs(), P(plan.axes)),
      params.specs(core.axis_names(plan.axes)).value,
      spans_model=True,
    )

  def make_compute(
    self, workers: Workers, loss: _results.LossOptions
  ) -> _scheme.Compute:
    """Makes the function of a worker's part of the gradient."""
    return _gather_plan.make_sharded_work(loss, self.plan)

  def update(
    self,
    workers: Workers,
    state: TrainState,
    grads: Any,
    results: _scheme.StepResults,
  ) -> tuple[PyTree, PyTree]:
    """Updates this worker's part by its part of the mean gradient."""
    plan, old = self.plan, state.opt_state
    grads, errors, flags = grads

    def clear_padding(tree: PyTree) -> PyTree:
      # A codec may decode zeros as other numbers, and an optimizer may make
      # noise of them, which would raise the scale of what is encoded beside.
      return _shard_layout.map_cuts(
        lambda cut, x: cut.clear_padding(x, plan.axes), tree, plan.cuts
      )

    _, ok = extend.apply_nonfinite_policy(
      self.options.nonfinite, (flags, results.weight), plan.axes
    )
    # Gathers reduced the gradients of parts, but nothing those of whole leaves.
    whole = _shard_layout.select_whole(grads, plan.cuts)
    if jax.tree.leaves(whole):
      means, _ = collectives.all_reduce(whole, plan.axis_name)
      cut = plan.select_cut(jax.tree.leaves(grads))
      grads = plan.join_leaves(cut, means, grads)
    extra_args = results.extra_args
    if results.value is not None:
      extra_args = {"value": results.value} | extra_args
    changes, inner = plan.update(
      self.tx, clear_padding(grads), old.inner, state.params, extra_args
    )
    errors = core.pack_worker(core.to_varying(errors, plan.axes))
    changes, (inner, errors) = extend.keep_update(
      ok, clear_padding(changes), (inner, errors), (old.inner, old.error)
    )
    counts = _states.count_update(old, ok)
    new = _states.FullyShardedState(*counts, inner, errors, old.made_for)
    return optax.apply_updates(state.params, changes), new


@core.declare(state=core.instance(TrainState, "what `init` or `step` returned"))
def read_params(state: TrainState) -> PyTree:
  """Returns the parameters of a training state, to evaluate and to save.

  They are `state.params`, but for leaves that `fully_sharded` pads because the
  workers do not divide them. Such a leaf loses its padding, and each device
  gets the workers' dimension of it whole. Give what was read to `init` to
  continue on another number of workers. Of several processes, all have to call
  the function.

  Args:
    state: what `init` or `step` returned, also inside of `jit`.

  Returns:
    The tree that `init` was given, with the shapes and dtypes that it had.

  Raises:
    TypeError: `state` is no `TrainState`.
    ValueError: parameters have other shapes than their optimizer state says.

  Example:
    >>> from jaxmotion import transforms
    >>> mesh = jax.sharding.Mesh(jax.devices()[:1], ("data",))
    >>> init, step = transforms.make_train_step(
    ...   lambda w, x: jnp.mean((x @ transforms.gather_params(w)) ** 2),
    ...   transforms.fully_sharded(optax.adam(1e-3)),
    ...   mesh,
    ... )
    >>> state = init(jnp.ones((33, 1023)))
    >>> read_params(state).shape
    (33, 1023)
  """
  held = state.opt_state
  if not isinstance(held, _states.FullyShardedState):
    return state.params
  cuts = held.made_for.cuts
  _gather_plan.check_padded(state.params, cuts)
  return _shard_layout.map_cuts(_trim_leaf, state.params, cuts)


def _trim_leaf(cut: LeafCut, x: Any) -> Array:
  """Trims a leaf, whose cut dimension explicit axes may not shard meanwhile."""
  if cut.dimension is None or not cut.is_padded:
    return x
  # Explicit axes refuse a slice that they do not divide.
  sharding = jax.typeof(x).sharding
  spec = P(
    *(None if i == cut.dimension else e for i, e in enumerate(sharding.spec))
  )
  if spec != sharding.spec:
    x = jax.sharding.reshard(x, NamedSharding(sharding.mesh, spec))
  return cut.trim_leaf(jnp.asarray(x))
