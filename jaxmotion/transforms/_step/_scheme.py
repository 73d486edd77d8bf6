"""Schemes: what a training step gives its loss, and does with the gradient."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import optax
from jax.sharding import Mesh, PartitionSpec as P

from jaxmotion import core
from jaxmotion.collectives.extend import update_params
from jaxmotion.core import Array, AxisName, PyTree
from jaxmotion.transforms import _init_state, _model_axes, _states
from jaxmotion.transforms._step import _local_work, _results


class TrainState(NamedTuple):
  """State of training, which a step takes and returns.

  Attributes:
    params: the scheme's parameters; `read_params(state)` returns those to
      evaluate and to save.
    model_state: state that the loss returns anew, such as batch statistics; a
      `PerWorker` if it is each worker's own, None if there is none.
    opt_state: state of the scheme: of the optax chain, with error memory.

  Example:
    >>> import optax
    >>> from jaxmotion import transforms
    >>> mesh = jax.sharding.Mesh(jax.devices()[:1], ("data",))
    >>> tx = optax.chain(transforms.exchange("data"), optax.sgd(0.1))
    >>> init, step = transforms.make_train_step(
    ...   lambda w, x: jnp.mean((x - w) ** 2), tx, mesh
    ... )
    >>> state = init(jnp.zeros(3))
    >>> state.params.tolist(), state.model_state
    ([0.0, 0.0, 0.0], None)
  """

  params: PyTree
  model_state: PyTree
  opt_state: PyTree


class StepResults(NamedTuple):
  """Results of a worker's own batch, which a scheme's update may use.

  Attributes:
    loss: float[], this worker's own loss.
    value: float[], the workers' mean loss, or None without `mean_loss`.
    weight: float32[], this worker's weight, or None without a `weight_fn`.
    extra_args: what the caller of `step` gave for the optimizer, and
      `sending=`, how the step sends: hand them to the update of a chain.
  """

  loss: Array
  value: Array | None
  weight: Array | None
  extra_args: dict[str, Any]


class Layout(NamedTuple):
  """Partition specs of a training state, and of a step's gradients."""

  # Over all axes of the mesh.
  params: PyTree
  opt_state: PyTree
  # With a leading axis of workers; None leaves gradients in place.
  grads: PyTree
  # Those of the parameters over the workers' axes alone.
  own_params: PyTree
  # Whether the map of the update is over all axes of the mesh.
  spans_model: bool = False


class Workers:
  """Workers that a training step is for, as a scheme sees them.

  Attributes:
    mesh: device mesh.
    axis_name: the axis (or axes) that the batch is split over, as functions of
      JAX take it.
    host_axes: the axes of hosts and of their devices, or None.
    count: number of workers.
    specs: how parameters are sharded over other axes; None: they are not.
    is_weighted: whether each worker has a weight.
    shardings: where arrays are on the mesh.
  """

  def __init__(
    self,
    mesh: Mesh,
    axis_name: AxisName,
    specs: PyTree = None,
    is_weighted: bool = False,
  ):
    self.mesh, self.is_weighted = mesh, is_weighted
    self.axis_name = _init_state.check_mesh(mesh, axis_name)
    is_host_axes = isinstance(axis_name, core.HostAxes)
    self.host_axes = axis_name if is_host_axes else None
    self.shardings = _model_axes.Shardings(mesh, self.axis_name, specs)
    self.specs = self.shardings.specs
    self.count = core.count_devices(axis_name, mesh.shape)


# (what `own` selects, model state, batch, key, number of microbatches or None)
# -> a worker's results.
Compute = Callable[..., _results.LocalWork]


class Scheme:
  """Way to train: what the loss is given, and what becomes of its gradient.

  Three functions make a scheme. All run inside of a map over the workers, where
  `jax.lax.pmean(x, workers.axis_name)` and `exchange` work. Values that differ
  between workers are kept as `PerWorker`. `make_train_step` does the rest:
  batches, keys, microbatches, weights, model state, donation.

  An optax chain with an `exchange` is a scheme already, of parameters that all
  workers share.

  Example:
    Workers that train apart and average their parameters every few steps (local
    SGD):

    >>> from jaxmotion import PerWorker, transforms
    >>> class LocalSGD(Scheme):
    ...   def __init__(self, rate, every):
    ...     self.rate, self.every = rate, every
    ...   def init(self, workers, params):
    ...     own = jax.lax.pcast(params, workers.axis_name, to="varying")
    ...     return jnp.int32(0), PerWorker(own[None])
    ...   def params(self, workers, state):
    ...     return state.opt_state[1].value[0]
    ...   def update(self, workers, state, grads, results):
    ...     count = state.opt_state[0] + 1
    ...     own = self.params(workers, state) - self.rate * grads
    ...     def average(own, shared):
    ...       mean = jax.lax.pmean(own, workers.axis_name)
    ...       return jax.lax.pcast(mean, workers.axis_name, to="varying"), mean
    ...     own, shared = jax.lax.cond(
    ...       count % self.every == 0, average, lambda own, shared:
    ...       (own, shared), own, state.params)
    ...     return shared, (count, PerWorker(own[None]))
    >>> mesh = jax.sharding.Mesh(jax.devices()[:1], ("data",))
    >>> init, step = transforms.make_train_step(
    ...   lambda w, x: jnp.mean((x - w) ** 2), LocalSGD(0.25, every=2), mesh)
    >>> state = init(jnp.zeros(()))
    >>> for _ in range(2):
    ...   state, loss = step(state, jnp.ones(4))
    >>> float(state.params)
    0.75
  """

  def __init_subclass__(cls) -> None:
    """Lets `init` refuse trainers that take an optax transformation."""
    init = cls.init

    @functools.wraps(init)
    def init_worker(self: Any, workers: Any, params: PyTree = None) -> PyTree:
      # Those trainers, and `optax.chain`, call `tx.init(params)`.
      if not isinstance(workers, Workers):
        raise TypeError(
          "`tx` must be an optax transformation, got a scheme: pass the scheme "
          "to `jaxmotion.make_train_step`, whose `init` and `step` train."
        )
      return init(self, workers, params)

    cls.init = init_worker  # type: ignore[method-assign]

  def init(self, workers: Workers, params: PyTree) -> PyTree:
    """Makes one worker's state of the scheme, inside of a map.

    Args:
      workers: the workers.
      params: parameters, whole and equal on all workers.
    """
    raise NotImplementedError

  def params(self, workers: Workers, state: Any) -> PyTree:
    """Returns the parameters that the loss is given, inside of a map.

    Args:
      workers: the workers.
      state: `TrainState` as one worker sees it, or what `own` selects of it.
    """
    raise NotImplementedError

  def update(
    self, workers: Workers, state: TrainState, grads: Any, results: StepResults
  ) -> tuple[PyTree, PyTree]:
    """Returns the new parameters and scheme's state, inside of a map.

    Args:
      workers: the workers.
      state: state before the step, as one worker sees it.
      grads: this worker's own gradient of what `params` returned.
      results: loss and weight of this worker's batch.
    """
    raise NotImplementedError

  # What follows has a default that most schemes keep.

  def for_workers(self, workers: Workers) -> "Scheme":
    """Returns the scheme for these workers: itself, or another one."""
    return self

  # Why workers cannot compute unequal numbers of microbatches; None: they can.
  counts_refusal: str | None = None

  # Whether `update` may get a `weight=` from the caller of `step`.
  takes_weight = False

  def bind(self, workers: Workers, state: TrainState) -> "Scheme":
    """Returns the scheme for a state of these shapes, outside of maps."""
    return self

  def own(self, state: TrainState) -> PyTree:
    """Selects what the gradient is computed from, of a state or its specs."""
    return state

  def count(self, opt_state: PyTree) -> Array | None:
    """Returns the number of steps so far, which keys are folded with."""
    return _states.find_count(opt_state)

  def start(self, workers: Workers, params: PyTree) -> tuple[PyTree, PyTree]:
    """Returns copies of parameters on the mesh, and the scheme's state."""
    shardings = workers.shardings

    @jax.jit
    def make_all(params: PyTree) -> tuple[PyTree, PyTree]:
      """Copies parameters to where they stay, and makes the scheme's state."""
      # A weak type, as that of `jnp.full`, would not last: `step` would be
      # compiled again after the first update.
      params = jax.tree.map(lambda a: a.astype(a.dtype), params)
      specs = shardings.params(params)
      params = shardings.place(params, specs)
      # A map, so that parameters are on the mesh whatever the state is.
      params = jax.shard_map(
        lambda tree: jax.tree.map(jax.numpy.copy, tree),
        in_specs=P(),
        out_specs=P(),
        **shardings.map_options,
      )(params)
      params = shardings.place(params, specs)
      state = _init_state.make_state(
        lambda p: self.init(workers, p), params, shardings
      )
      return params, state

    return make_all(
      core.put_on_mesh(params, workers.mesh, shardings.params(params))
    )

  def layout(self, workers: Workers, state: TrainState) -> Layout:
    """Returns where the state and the gradients are on the mesh."""
    shardings = workers.shardings
    return Layout(
      params=shardings.params(state.params),
      opt_state=shardings.state(state.opt_state, state.params),
      grads=None,
      own_params=P(),  # All workers hold the same.
    )

  def make_compute(
    self, workers: Workers, loss: _results.LossOptions
  ) -> Compute:
    """Makes the function of one worker's gradient, inside of a map."""
    compute_work = _local_work.make_local_work(loss)
    return lambda own, *inputs: compute_work(self.params(workers, own), *inputs)

  def refuse_threads(self, loss: _results.LossOptions) -> str | None:
    """Returns why second threads cannot send beside computation, or None."""
    return f"for {type(self).__name__}, which second threads cannot send"

  # Whether what a step sends may be in flight when it returns. What `own`
  # selects must then not depend on it, and the scheme has two more functions.
  may_fly = False

  def replace_own(self, state: TrainState, own: PyTree) -> TrainState:
    """Returns the state with other values of what `own` selects, or None."""
    raise NotImplementedError

  def find_phase(self, count: int) -> int:
    """Returns the number of one step for all that do what this one does."""
    raise NotImplementedError


class Replicated(Scheme):
  """Data parallelism of parameters that all workers share."""

  takes_weight = True

  def __init__(self, tx: optax.GradientTransformation):
    self.tx = tx

  def init(self, workers: Workers, params: PyTree) -> PyTree:
    """Makes the state of the chain."""
    return self.tx.init(params)

  def params(self, workers: Workers, state: Any) -> PyTree:
    """Returns the shared parameters."""
    return state

  def own(self, state: TrainState) -> PyTree:
    """Selects the parameters of a state."""
    return state.params

  def layout(self, workers: Workers, state: TrainState) -> Layout:
    """Returns where the state and the gradients are on the mesh."""
    grads = workers.shardings.grads(state.params)
    return super().layout(workers, state)._replace(grads=grads)

  def update(
    self, workers: Workers, state: TrainState, grads: Any, results: StepResults
  ) -> tuple[PyTree, PyTree]:
    """Runs the chain, which exchanges the gradient, and applies its updates."""
    extra_args = results.extra_args
    if results.weight is not None:
      extra_args = extra_args | {"weight": results.weight}
    return update_params(
      self.tx,
      grads,
      state.opt_state,
      state.params,
      extra_args,
      workers.axis_name,
      results.value,
    )

  def refuse_threads(self, loss: _results.LossOptions) -> str | None:
    """Returns None, as all that threads send arrives within the step."""
    return None


def as_scheme(name: str, scheme: Any) -> Scheme:
  """Returns a scheme, also for an optax chain; raises for anything else."""
  if isinstance(scheme, Scheme):
    return scheme
  kinds = optax.GradientTransformation, optax.MultiSteps
  core.instance(kinds, "a Scheme or an optax transformation")(name, scheme)
  return Replicated(_states.as_transformation(name, scheme))
