"""Scheme whose parameters and optimizer are sharded over workers."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding, PartitionSpec as P

from jaxmotion import codecs, core
from jaxmotion.codecs.extend import check_codec
from jaxmotion.collectives.extend import (
  NONFINITE_POLICIES,
  apply_nonfinite_policy,
  keep_update,
)
from jaxmotion.core import PyTree
from jaxmotion.transforms import _exchange, _placement, _states
from jaxmotion.transforms.parts import (
  _fully_sharded_plan,
  _fully_sharded_work,
  _parts,
  _shard_layout,
)
from jaxmotion.transforms.step import _local_work, _scheme


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
) -> _scheme.Scheme:
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

  Leaves of the `params` that `loss_fn` gets are `WeightPart` if they are cut:
  make arrays of them by `gather_params`, or wrap blocks in `gather_block`. With
  `microbatches`, each part gathers weights and reduces its gradient, so bytes
  grow with it: a whole gradient is never in memory.

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
  tx = _placement.as_transformation(tx)
  core.check_choice("regather", regather, (True, False, "local"))
  options = _fully_sharded_plan.GatherPlan(
    weight_codec,
    gradient_codec,
    local_codec,
    error_feedback,
    regather,
    nonfinite,
    _fully_sharded_plan.compile_pattern(stacked),
    seed,
  )
  for name, codec in options.codecs.items():
    if codec is not None:
      check_codec(name, codec, trees=True)
  core.check_bool("error_feedback", error_feedback)
  core.check_choice("nonfinite", nonfinite, NONFINITE_POLICIES)
  core.check_int("seed", seed, 0, 2**32 - 1)
  return FullySharded(optax.with_extra_args_support(tx), options)


@dataclasses.dataclass(frozen=True)
class FullySharded(_scheme.Scheme):
  """Scheme of parameters that `fully_sharded` divides between workers.

  Attributes:
    tx: optimizer of each worker's part.
    options: what the caller of `fully_sharded` gave.
    plan: division of the parameters between workers; None before `bind`.
  """

  tx: optax.GradientTransformationExtraArgs
  options: _fully_sharded_plan.GatherPlan
  plan: Any = None
  counts_refusal = (
    "workers of a fully sharded step gather weights together in each microbatch"
  )

  def bind(
    self, workers: _scheme.Workers, state: _scheme.TrainState
  ) -> "FullySharded":
    """Returns the scheme with the division of this state, or raises."""
    plan = _fully_sharded_plan.find_plan(
      self.options, workers, state.params, state.opt_state
    )
    return dataclasses.replace(self, plan=plan)

  def init(self, workers: _scheme.Workers, params: PyTree) -> PyTree:
    """Makes a worker's state of whole parameters, on any mesh."""
    mesh = jax.sharding.get_abstract_mesh()
    plan = _fully_sharded_plan.make_plan(self.options, workers, params, mesh)
    parts = _shard_layout.map_cuts(
      lambda cut, x: cut.own_part(x, plan.axes), params, plan.cuts
    )
    inner = _parts.init_parts(self.tx, parts, plan.cuts, plan.axes, plan.model)
    memory = core.to_varying(plan.make_memory(), plan.axes)
    return plan.make_state(inner, core.pack_worker(memory))

  def start(
    self, workers: _scheme.Workers, params: PyTree
  ) -> tuple[PyTree, PyTree]:
    """Cuts parameters on the mesh, and makes the state of their parts."""
    params, mesh = jax.tree.map(jnp.asarray, params), workers.mesh
    self.options.check_stacked(params)
    plan = _fully_sharded_plan.make_plan(self.options, workers, params, mesh)
    params = _shard_layout.map_cuts(
      lambda cut, x: cut.pad_leaf(x), params, plan.cuts
    )
    specs = plan.param_specs(params)

    def find_shardings(specs: PyTree) -> PyTree:
      return jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs)

    def copy_params(params: PyTree) -> PyTree:
      # A weak type would not last: `step` would be compiled again.
      return jax.tree.map(lambda a: jnp.copy(a.astype(a.dtype)), params)

    params = jax.jit(copy_params, out_shardings=find_shardings(specs))(
      core.put_on_mesh(params, mesh, specs)
    )

    def init_inner(parts: PyTree) -> PyTree:
      return _parts.init_parts(self.tx, parts, plan.cuts, plan.axes, plan.model)

    maps: dict[str, Any] = {"mesh": mesh, "in_specs": (specs,)}
    shapes = core.eval_shape_in_map(init_inner, maps, params)
    _placement.check_unexchanged(shapes)
    make_inner = jax.shard_map(init_inner, out_specs=shapes.specs(), **maps)

    def make_state(params: PyTree) -> _states.FullyShardedState:
      memory = core.PerWorker(plan.make_memory(workers.count))
      return plan.make_state(make_inner(params), memory)

    shardings = find_shardings(plan.state_specs(shapes))
    return params, jax.jit(make_state, out_shardings=shardings)(params)

  def params(self, workers: _scheme.Workers, state: Any) -> PyTree:
    """Returns this worker's parts; `make_compute` lets the loss gather them."""
    return state[0]

  def own(self, state: _scheme.TrainState) -> PyTree:
    """Selects parts, the number of updates and error memory."""
    return state.params, state.opt_state.count, state.opt_state.error

  def layout(
    self, workers: _scheme.Workers, state: _scheme.TrainState
  ) -> _scheme.Layout:
    """Returns where parts are on the mesh."""
    plan, params, inner = self.plan, state.params, state.opt_state.inner
    specs = plan.state_specs(inner)
    return _scheme.Layout(
      plan.param_specs(params),
      specs,
      _fully_sharded_work.find_gradient_specs(plan, params),
      plan.param_specs(params, plan.axes),
      specs._replace(
        inner=inner.specs(core.axis_names(plan.axes)), error=P(plan.axes)
      ),
      spans_model=True,
    )

  def make_compute(
    self, workers: _scheme.Workers, loss: _local_work.LossOptions
  ) -> _scheme.Compute:
    """Makes the function of a worker's part of the gradient."""
    return _fully_sharded_work.make_sharded_work(loss, self.plan)

  def update(
    self,
    workers: _scheme.Workers,
    state: _scheme.TrainState,
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

    _, ok = apply_nonfinite_policy(
      self.options.nonfinite, (flags, results.weight), plan.axes
    )
    grads = _fully_sharded_work.average_whole(plan, grads)
    extra_args = results.extra_args
    if results.value is not None:
      extra_args = {"value": results.value} | extra_args
    changes, inner = _parts.update_parts(
      self.tx,
      clear_padding(grads),
      old.inner,
      state.params,
      plan.cuts,
      plan.axes,
      extra_args,
      plan.model,
    )
    errors = core.pack_worker(core.to_varying(errors, plan.axes))
    changes, (inner, errors) = keep_update(
      ok, clear_padding(changes), (inner, errors), (old.inner, old.error)
    )
    new = _states.FullyShardedState(
      *_exchange.count_update(old, ok), inner, errors, old.made_for
    )
    return optax.apply_updates(state.params, changes), new
