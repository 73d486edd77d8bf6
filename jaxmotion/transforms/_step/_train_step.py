"""Training step of a loss function over the workers of a mesh axis."""

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, PartitionSpec as P

from jaxmotion import core, hosts
from jaxmotion.collectives.extend import check_rows
from jaxmotion.core import Array, AxisName, PyTree
from jaxmotion.transforms import _init_state, _states
from jaxmotion.transforms._step import (
  _agreement,
  _compiled_step,
  _results,
  _scheme,
  _step_arguments,
)
from jaxmotion.transforms._step._results import LocalWork, LossOptions
from jaxmotion.transforms._step._scheme import Scheme, TrainState, Workers


class StepFunction(Protocol):
  """Jitted training step, and its two halves."""

  compute: Callable[..., LocalWork]
  update: Callable[..., tuple[TrainState, PyTree]]
  lower: Callable[..., Any]
  trace: Callable[..., Any]
  eval_shape: Callable[..., Any]

  def __call__(
    self,
    state: TrainState,
    batch: PyTree,
    *,
    key: Array | None = None,
    counts: Any = None,
    **extra_args: Any,
  ) -> tuple[TrainState, PyTree]:
    """Trains the state by one step on a batch."""


class TrainStep(NamedTuple):
  """The two functions that `make_train_step` returns.

  Attributes:
    init: (params) or (params, model_state) -> `TrainState`, placed on the mesh.
      The result is a copy.
    step: (state, batch, *, key=None, counts=None, **extra_args) ->
      (state, loss or (loss, aux)), jitted. Its two halves are
      `step.compute(state, batch, *, key=None, counts=None) -> work`, which
      sends nothing, and `step.update(state, work, **extra_args)`.

  Example:
    >>> import optax
    >>> from jaxmotion import transforms
    >>> mesh = jax.sharding.Mesh(jax.devices()[:1], ("data",))
    >>> tx = optax.chain(transforms.exchange("data"), optax.sgd(0.5))
    >>> training = make_train_step(
    ...   lambda w, x: jnp.mean((x - w) ** 2), tx, mesh
    ... )
    >>> state, loss = training.step(training.init(jnp.zeros(())), jnp.ones(4))
    >>> float(state.params), float(loss)
    (1.0, 1.0)
  """

  init: Callable[..., TrainState]
  step: StepFunction


@core.declare(
  loss_fn=core.function,
  scheme=_scheme.as_scheme,
  has_aux=core.boolean,
  model_state=core.choice((None, "mean", "local")),
  weight_fn=core.optional(core.function),
  microbatches=core.integer(1, 2**31 - 1),
  mean_loss=core.boolean,
  overlap=core.choice(hosts.OVERLAPS),
  donate=core.boolean,
)
def make_train_step(
  loss_fn: Callable[..., Any],
  scheme: Scheme | optax.GradientTransformation | optax.MultiSteps,
  mesh: Mesh,
  *,
  axis_name: AxisName = "data",
  has_aux: bool = False,
  model_state: str | None = None,
  weight_fn: Callable[..., Any] | None = None,
  microbatches: int = 1,
  mean_loss: bool = True,
  specs: PyTree | None = None,
  overlap: str | None = None,
  donate: bool = True,
) -> TrainStep:
  """Makes `init` and `step` for training over a mesh axis.

  Args:
    loss_fn: (params, batch) -> scalar mean over the worker's own batch, or
      (scalar, aux) with `has_aux`. With `model_state` it is
      (params, model_state, batch) -> (scalar, model_state), or
      (scalar, (model_state, aux)). It also takes `key=` if `step` is given one.
    scheme: how to train. An optax chain with an `exchange` over `axis_name`:
      all workers share parameters, and the chain may be `delayed`. Or
      `fully_sharded(tx)`, `local_updates(inner, outer, every=...)`, or a
      `Scheme` of your own.
    mesh: device mesh that has the axis.
    axis_name: the axis (or axes) that the batch is split over. `HostAxes` tell
      a scheme which of them are those of one host.
    has_aux: whether `loss_fn` returns auxiliary values. Floating-point scalars
      are averaged over workers. Other values, such as counts and logits, get a
      leading axis of workers.
    model_state: what becomes of state that `loss_fn` returns anew, such as
      batch statistics. "mean" averages floating-point leaves over workers, in
      one sum with the loss. Integers, bools and keys have no mean: they must
      not depend on the batch, which is checked, and so are equal. "local"
      keeps each worker's own, as a `PerWorker` with a leading axis of workers.
      None: there is no such state. A step that `skip_nonfinite` or
      `nonfinite="skip"` skips keeps the floating-point leaves too.
    weight_fn: batch -> the worker's weight, such as the number of tokens that
      are no padding, for a `loss_fn` that is a mean over these. Gradient, loss,
      averaged scalars and model state are then the weighted means: those of the
      whole batch. A worker of weight 0 adds nothing, even if its loss is not
      finite. The exchange gets the weight as `weight=`. None: all weigh the
      same.
    microbatches: number of parts that a worker's batch is computed in, one
      after the other, to save memory. Their gradients are averaged in float32
      and exchanged once. Model state goes from one part to the next. Part i
      gets the key `fold_in(key, i)`. Auxiliary values that are not averaged
      have axes of workers and microbatches. With `counts`, a worker computes
      some of its microbatches, see `step`.
    mean_loss: whether the loss (and floating-point scalars of the auxiliary
      values) are the workers' mean. That mean is a collective of its own,
      which costs round trips and makes workers wait for one another. Without
      it each value has a leading axis of workers, and a process holds only its
      own workers' values.
    specs: how parameters are sharded over axes of the mesh that are not the
      workers' (tensor parallelism). A tree of PartitionSpecs like the
      parameters, or a prefix of it. Parameters and moments keep these
      shardings, and XLA's partitioner computes `loss_fn` as it does under
      `jit`. Each device encodes, sends and remembers its own shard. None:
      parameters are replicated.
    overlap: how the exchange runs beside the computation. "program": both are
      one program, which compilers for GPU and TPU overlap. "thread": second
      threads of each process send, which overlaps on CPU; a process then has
      one device. The step is cut into programs. Gradients of the last layers
      are encoded and sent while those of earlier layers are computed. Between
      two hosts, two sums are on the link at a time. A step with host callbacks
      stays one program. None chooses "thread" between CPU hosts, where the
      scheme allows it.
    donate: whether `step` takes the buffers of the state for its results, so
      that the state exists once. It is deleted then: go on with what `step`
      returned. False keeps it, for a notebook whose cells run twice.

  Returns:
    init: params -> `TrainState`; with `model_state`, (params, model_state) ->
      `TrainState`. It is a copy, placed on the mesh: per-worker state is split
      over the axis, all else as the scheme says.
    step: (state, batch, *, key=None, counts=None, **extra_args) ->
      (state, loss or (loss, aux)), jitted. What a step returns is what the next
      one takes. Every leaf of `batch` is split along its leading axis; all
      workers get its scalars. On several CPU devices of one process, a call
      waits until at most 4 steps are in flight. XLA:CPU can hang when a loop
      runs further ahead.

      `key` is a key of `jax.random`; `loss_fn` gets
      `fold_in(fold_in(key, count), worker)`, in which `count` is the number of
      steps so far. So one key serves all steps: every worker and every step
      draws its own dropout mask.

      `counts`, int[workers], is for workers of unequal speed: worker i computes
      its first `counts[i]` of `microbatches`, and none waits for another. The
      mean is that over all examples, weighted by `weight_fn`, which must be
      given. One program serves all counts. Each microbatch begins with the
      step's model state, whose leaves must be floating-point; their weighted
      mean is kept. `hetero` chooses counts and assigns examples to them.

      Extra arguments go to the optimizer: scalars that all workers share. A
      chain that needs `value=` gets the workers' mean loss (`mean_loss`). To
      log the norm of the mean gradient, put
      `optax.snapshot("norm", optax.tree.norm)` after the exchange and read
      `optax.tree.get(state.opt_state, "norm")`.

      `step.compute(state, batch, key=, counts=)` and then
      `step.update(state, work, **extra_args)` are the step in two programs.
      The first one sends nothing: a worker's time for it is its own.

  Raises:
    TypeError: an argument of another type. `step` raises it for an extra
      argument that changes no result, such as a misspelt `key`.
    ValueError: the mesh has no such axis; an unknown `model_state`; threads for
      several devices of a process. `init` raises it for a scheme whose
      exchange is missing or in the wrong place. It also raises it for processes
      whose parameters, codecs or learning rates differ. `step` raises it for a
      chain that does not exchange gradients before they are used. It raises it
      for a batch that workers and `microbatches` do not divide. It also raises
      it for a `loss_fn` that returns something else, and for a state that was
      donated before.

  Example:
    >>> import optax
    >>> from jaxmotion import codecs, transforms
    >>> mesh = jax.sharding.Mesh(jax.devices()[:1], ("data",))
    >>> def loss_fn(params, batch):
    ...   return jnp.mean((batch["x"] @ params["w"] - batch["y"]) ** 2)
    >>> tx = optax.chain(
    ...   transforms.exchange("data", codecs.uniform(bits=8)), optax.sgd(0.1)
    ... )
    >>> init, step = make_train_step(loss_fn, tx, mesh)
    >>> state = init({"w": jnp.zeros((2, 1))})
    >>> batch = {"x": jnp.eye(2), "y": jnp.ones((2, 1))}
    >>> state, loss = step(state, batch)
    >>> float(loss)
    1.0
  """
  workers = Workers(mesh, axis_name, specs, weight_fn is not None)
  loss = LossOptions(
    loss_fn, has_aux, model_state, weight_fn, microbatches, mean_loss
  )
  scheme = scheme.for_workers(workers)
  driver = _Driver(workers, scheme, loss)
  way = "program"
  refusal = scheme.refuse_threads(loss)
  if refusal is None:
    way = hosts.choose_overlap(mesh, workers.axis_name, overlap)
  elif overlap == "thread":
    raise ValueError(f"`overlap` must be 'program' {refusal}, got 'thread'.")

  def step(
    state: TrainState,
    batch: PyTree,
    *,
    key: Array | None = None,
    counts: Array | None = None,
    **extra_args: Any,
  ) -> tuple[TrainState, PyTree]:
    """Trains the state by one step on a batch."""
    # Two maps, of which XLA makes one program. Only the second checks what
    # varies over workers, so that replicas that could differ are an error.
    work = driver.compute(state, batch, key=key, counts=counts)
    return driver.update(state, work, **extra_args)

  call = None
  if way == "thread" and scheme.may_fly:
    call = _compiled_step.FlyingStep(
      scheme, driver.compute, driver.update, mesh, donate=donate
    )
  compiled = _compiled_step.compile_step(
    step,
    mesh,
    donates=donate,
    prepare=driver.check_counts,
    call=call,
    overlaps=way == "thread",
  )
  compiled.compute = _compiled_step.compile_step(
    driver.compute, mesh, prepare=driver.check_counts
  )
  compiled.update = _compiled_step.compile_step(
    driver.update, mesh, donates=donate
  )

  def init(params: PyTree, model_state: PyTree = None) -> TrainState:
    return driver.init(params, model_state)

  maker = _init_state.StateMaker(
    lambda params: scheme.init(workers, params),
    divide=getattr(scheme, "divide", None),
  )
  setattr(init, _init_state.MAKER, maker)
  return TrainStep(init, compiled)


class _Driver:
  """Runs the parts of a training step: `init`, `compute` and `update`."""

  def __init__(self, workers: Workers, scheme: Scheme, loss: LossOptions):
    self._workers, self._scheme, self._loss = workers, scheme, loss
    self._split = P(workers.axis_name)
    self._keeps_own = loss.model_state == "local"
    self._model_spec = self._split if self._keeps_own else P()

  @core.declare(params=core.arrays, model_state=core.arrays)
  def init(self, params: PyTree, model_state: PyTree = None) -> TrainState:
    """Checks parameters and model state, and makes the state on the mesh."""
    kind = self._loss.model_state
    if (kind is None) != (model_state is None):
      wanted = "be None without" if kind is None else "go with"
      raise ValueError(
        f"`model_state` must {wanted} `make_train_step(..., model_state=...)`, "
        f"got {type(model_state).__name__} for {kind!r}."
      )
    _states.check_trained(params)
    self._workers.shardings.check_params(params)
    core.check_buffers({"params": params, "model_state": model_state})
    shared = None if self._keeps_own else model_state
    _agreement.check_processes(self._workers, self._scheme, params, shared)
    params, opt_state = self._scheme.start(self._workers, params)
    model = self._place_model(model_state)
    return TrainState(params, model, opt_state)

  def check_counts(self, given: dict[str, Any]) -> dict[str, Any]:
    """Returns arguments of `step` whose `counts` are int32[workers]."""
    counts = given.get("counts")
    if counts is None:
      return given
    if self._loss.weight_fn is None:
      raise ValueError(
        "`counts` must go with a `weight_fn`, whose sum over a worker's "
        f"microbatches weighs its gradient, got {counts!r} without."
      )
    refusal = self._scheme.counts_refusal
    if refusal is not None:
      raise ValueError(
        f"`counts` must be None, because {refusal}, got {counts!r}."
      )
    workers, most = self._workers.count, self._loss.microbatches
    is_traced = isinstance(counts, jax.core.Tracer)
    values: Any = counts if is_traced else np.asarray(counts)
    is_integer = jnp.issubdtype(values.dtype, jnp.integer)
    fits = is_integer and values.shape == (workers,)
    if fits and not is_traced:
      fits = bool(((values >= 0) & (values <= most)).all())
    if not fits:
      raise ValueError(
        f"`counts` must be {workers} integers in [0, {most}], as "
        f"`microbatches` is {most}, got {counts}."
      )
    return given | {"counts": values.astype(jnp.int32)}

  @core.declare(key=_step_arguments.step_key)
  def compute(
    self,
    state: TrainState,
    batch: PyTree,
    *,
    key: Array | None = None,
    counts: Array | None = None,
  ) -> LocalWork:
    """Computes all workers' gradients in a map that exchanges nothing."""
    workers, loss, model_spec = self._workers, self._loss, self._model_spec
    self._check_state(state)
    if counts is not None:  # Unequal work joins model states by their mean.
      for path, leaf in core.named_leaves(state.model_state):
        core.float_array(f"model_state/{path}", leaf)
    bound = self._scheme.bind(workers, state)
    layout = bound.layout(workers, state)
    batch_specs = _step_arguments.split_specs(
      "batch", batch, workers.mesh, workers.axis_name, loss.microbatches
    )
    keys = None
    if key is not None:
      count = bound.count(state.opt_state)
      if count is None:
        raise ValueError(
          "`key` must be None for a state without a `count` of steps, because "
          "all steps would draw the same numbers, got a key: return one from "
          "`Scheme.count`."
        )
      # The key of every worker in this step, of shape (workers, ...).
      fold_each = jax.vmap(jax.random.fold_in, in_axes=(None, 0))
      key = jax.random.fold_in(key, count)
      keys = fold_each(key, jnp.arange(workers.count))
    compute = bound.make_compute(workers, loss)

    def compute_own(
      own: PyTree, model: PyTree, batch: PyTree, keys: PyTree, counts: PyTree
    ) -> LocalWork:
      """Computes one worker's gradient from its part of the batch and keys."""
      inputs = batch, *jax.tree.map(lambda a: a[0], (keys, counts))
      if self._keeps_own:
        noun = "the PerWorker that `init` returned"
        core.instance(core.PerWorker, noun)("model_state", model)
        model = core.unpack_worker(model)
      elif loss.model_state is not None:
        _results.check_equal(
          lambda model, given: compute(given[0], model, *given[1:]).model_state,
          model,
          (own, *inputs),
          workers.axis_name,
        )
      return _results.add_rows(compute(own, model, *inputs))

    select = lambda params, opt_state: bound.own(
      TrainState(params, None, opt_state)
    )
    own = select(state.params, state.opt_state)
    specs = model_spec, batch_specs, self._split, self._split
    args = workers.shardings.place(
      (own, state.model_state, batch, keys, counts),
      (select(layout.params, layout.opt_state), *specs),
    )
    own_state = core.state_specs(state.opt_state, workers.axis_name)
    own_specs = select(layout.own_params, own_state)
    work = jax.shard_map(
      compute_own,
      mesh=workers.mesh,
      in_specs=(own_specs, *specs),
      out_specs=self._split,
      # Other axes of the mesh stay the loss's: it may use constraints and maps
      # over them.
      axis_names=set(core.axis_names(workers.axis_name)),
      # Types would refuse loops whose carry starts as zeros. JAX would also sum
      # the gradients of replicated parameters at full precision.
      check_vma=False,
    )(*args)
    if layout.grads is None:
      return work
    grads = workers.shardings.place(work.grads, layout.grads)
    return work._replace(grads=grads)

  @core.declare(work=core.instance(LocalWork, "what `step.compute` returned"))
  def update(
    self, state: TrainState, work: LocalWork, **extra_args: Any
  ) -> tuple[TrainState, PyTree]:
    """Exchanges gradients and updates the state, in a map of checked types."""
    workers, loss = self._workers, self._loss
    shardings, split = workers.shardings, self._split
    self._check_state(state)
    sending = hosts.check_sending(extra_args.pop("sending", None))
    bound = self._scheme.bind(workers, state)
    is_free = bound.takes_weight and loss.weight_fn is None
    if "weight" in extra_args and not is_free:
      raise ValueError(
        "`weight` must not be given, because `weight_fn` makes it, got "
        f"{extra_args['weight']!r}."
      )
    layout = bound.layout(workers, state)
    placed = own = TrainState(layout.params, self._model_spec, layout.opt_state)
    options: dict[str, Any] = {"mesh": workers.mesh}
    grads: Any = layout.grads
    if not layout.spans_model:
      own_state = core.state_specs(state.opt_state, workers.axis_name)
      own = own._replace(params=layout.own_params, opt_state=own_state)
      options, grads = shardings.map_options, split
    state, extra_args = shardings.place((state, extra_args), (placed, P()))
    rows: Any = split
    work_specs = LocalWork(rows, rows, grads, rows)
    metric_specs = jax.tree.map(
      lambda m: P() if _results.is_averaged(m, loss.mean_loss) else split,
      work.metrics,
    )

    def update_own(
      state: TrainState, work: LocalWork, extra_args: dict[str, Any]
    ) -> tuple[TrainState, PyTree]:
      """Exchanges one worker's gradient and updates the state, in a map."""
      metrics, model = _results.average_work(
        work, state.model_state, workers.axis_name, loss
      )
      shared = model if loss.model_state == "mean" else None
      wait = sending.wait_for((metrics if loss.mean_loss else None, shared))
      results = _scheme.StepResults(
        loss.get_loss(work.metrics)[0],
        loss.get_loss(metrics) if loss.mean_loss else None,
        None if work.weight is None else work.weight[0],
        extra_args | {"sending": wait},
      )
      params, opt_state = bound.update(
        workers, state, _results.drop_rows(work.grads), results
      )
      if loss.model_state is not None:
        model = _results.keep_if_skipped(
          model, state.model_state, state.opt_state, opt_state
        )
      return TrainState(params, model, opt_state), metrics

    new, metrics = jax.shard_map(
      update_own,
      in_specs=(own, work_specs, P()),
      out_specs=(own, metric_specs),
      **options,
    )(state, work, extra_args)
    return shardings.place(new, placed), metrics

  def _check_state(self, state: TrainState) -> None:
    """Raises unless the state has a row for each worker, or for each device."""
    core.instance(TrainState, "the TrainState that `init` returned")(
      "state", state
    )
    # Either will do: an exchange has a row for each device, if devices have
    # shards of a model.
    try:
      check_rows(state, [self._workers.count, self._workers.mesh.size])
    except ValueError as error:
      raise ValueError(
        f"`state` must be that of {self._workers.count} workers, which "
        f"`checkpoint.resize` makes of another. {error}"
      ) from None

  def _place_model(self, model: PyTree) -> PyTree:
    """Returns a copy of the model state on the mesh."""
    shardings = self._workers.shardings

    def copy_own(model: PyTree) -> PyTree:
      model = jax.tree.map(lambda a: jnp.copy(a.astype(a.dtype)), model)
      return core.pack_worker(model) if self._keeps_own else model

    @jax.jit
    def copy(model: PyTree) -> PyTree:
      maps: Any = {"in_specs": P(), "out_specs": self._model_spec}
      copy_all = jax.shard_map(copy_own, **maps, **shardings.map_options)
      return copy_all(shardings.place(model, P()))

    return copy(core.put_on_mesh(model, self._workers.mesh, P()))
