"""Training step whose workers update by themselves and exchange at times."""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, PartitionSpec as P

from jaxmotion import core
from jaxmotion.collectives.extend import (
  branch_after,
  check_rows,
  run_with_loss,
)
from jaxmotion.core import Array, AxisName, PyTree
from jaxmotion.transforms import (
  _averages,
  _compiled_step,
  _fragments,
  _init_state,
  _local_flights,
  _local_round,
  _local_work,
  _placement,
  _sender,
  _shardings,
  _stacked_update,
  _state_maker,
  _step_arguments,
  _step_keys,
)


def local_updates(
  loss_fn: Callable[..., Any],
  inner: optax.GradientTransformation,
  outer: optax.GradientTransformation,
  mesh: Mesh,
  *,
  every: int,
  fragments: int = 1,
  delay: int = 0,
  mix: float = 0.0,
  axis_name: AxisName = "data",
  specs: PyTree | None = None,
  has_aux: bool = False,
  weight_fn: Callable[..., Any] | None = None,
  microbatches: int = 1,
  parts: _fragments.Parts | None = None,
  mean_loss: bool = True,
  nonfinite: str = "skip",
  overlap: str | None = None,
  donate: bool = True,
) -> tuple[Callable[..., Any], Callable[..., Any]]:
  r"""Makes `init` and `step` for workers that exchange at some steps only.

  Each worker trains its own parameters (local SGD, DiLoCo). Every `every` steps
  the workers exchange how far they went from the anchor, the parameters that
  they agreed on last. With the gradient of the outer chain

  .. math:: d_r = a - p_r

  the chain's update moves the anchor a, and own parameters p_r begin there
  again. A quiet step sends nothing but its loss.

  With fragments, a part of the parameters is sent every `every / fragments`
  steps, in turns, so that no step sends them all (streaming DiLoCo). With a
  delay, a fragment lands some steps after it was sent. With `mix`, a worker
  keeps a share of its own parameters: p = mix p + (1 - mix) a.

  Args:
    loss_fn: (params, batch) -> scalar mean over the worker's own batch, or
      (scalar, aux) with `has_aux`. It also takes `key=` if `step` is given one.
    inner: optimizer of each worker, without an exchange. Its state is kept over
      exchanges.
    outer: optax chain with an `exchange` over `axis_name`, such as
      `chain(exchange("data", codec), sgd(0.7, momentum=0.9, nesterov=True))`.
    mesh: device mesh that has the axis.
    every: number of steps between two exchanges of the same parameters.
    fragments: number of parts of the parameters, a divisor of `every`.
    delay: number of steps between sending and landing, less than `every`.
    mix: share of its own parameters that a worker keeps, in [0, 1).
    axis_name: the axis (or axes) that the batch is split over.
    specs: how parameters are sharded over other axes of the mesh, as for
      `data_parallel`; None: they are not. Give them to the exchange too.
    has_aux: whether `loss_fn` returns auxiliary values, as for `data_parallel`.
    weight_fn: batch -> the worker's weight, such as its number of tokens. The
      exchange weighs workers by what they summed up since the fragment was
      sent last.
    microbatches: number of parts that a worker's batch is computed in.
    parts: (path, shape) -> index of the fragment. None deals leaves out in
      turns, the largest first.
    mean_loss: whether the loss is the workers' mean, which every step sends.
      False gives it a leading axis of workers, and quiet steps send nothing.
    nonfinite: "skip": if a fragment is not finite on a worker when it is due,
      it is not sent and nothing moves. This worker begins at the anchor with a
      fresh inner state; others keep what they have changed. It costs a sum of 4
      bytes. "propagate" checks nothing.
    overlap: how a fragment in flight is sent beside the steps that follow.
      "thread": a second thread of each process sends, which overlaps on CPU; a
      process then has one device. "program": it is sent in its own step. None
      chooses "thread" between CPU hosts, if there is a delay. With it, wait for
      `state.anchor` before another program of yours sends anything.
    donate: whether `step` takes the buffers of `state` for its results.

  Returns:
    init: params -> `LocalState`, placed on the mesh. Evaluate and save its
      `anchor`; `params` are each worker's own.
    step: (state, batch, *, key=None, **extra_args) -> (state, loss or
      (loss, aux)), jitted. `batch` is split as by `data_parallel`.
      `loss_fn` gets the key `fold_in(fold_in(key, count), worker)`. Extra
      arguments go to the outer chain's update. Its program branches over what
      is due: `wire.compiled_bytes(compiled, branch=0)` is a quiet step, and
      `branch=1` what a step would send in which all fragments are due.

  Raises:
    TypeError: an argument of another type.
    ValueError: the mesh has no such axis; `fragments` do not divide `every`; a
      `delay` of `every` or more. `init` raises it for an `inner` with an
      exchange, an `outer` without one, and fragments that no leaf fills.

  Example:
    >>> from jaxmotion import codecs, transforms
    >>> mesh = jax.sharding.Mesh(jax.devices()[:1], ("data",))
    >>> def loss_fn(params, batch):
    ...   return jnp.mean((batch["x"] @ params["w"] - batch["y"]) ** 2)
    >>> outer = optax.chain(
    ...   transforms.exchange("data", codecs.uniform(bits=8)), optax.sgd(1.0)
    ... )
    >>> init, step = local_updates(
    ...   loss_fn, optax.sgd(0.1), outer, mesh, every=2
    ... )
    >>> state = init({"w": jnp.zeros((2, 1))})
    >>> batch = {"x": jnp.eye(2), "y": jnp.ones((2, 1))}
    >>> for _ in range(2):
    ...   state, loss = step(state, batch)
    >>> state.anchor["w"].ravel().tolist() == [0.19, 0.19]
    False
    >>> bool(jnp.allclose(state.anchor["w"], 0.19, atol=1e-3))
    True

  References:
    Douillard et al., *DiLoCo*, arXiv 2311.08105, 2023; Douillard et al.,
    *Streaming DiLoCo with overlapping communication*, arXiv 2501.18512, 2025.
  """
  core.check_callable("loss_fn", loss_fn)
  inner = _placement.as_transformation(inner, "inner")
  outer = _placement.as_transformation(outer, "outer")
  core.check_instance("mesh", mesh, Mesh, "a jax.sharding.Mesh")
  core.check_axis_name("axis_name", axis_name)
  _local_work.check_loss_options(has_aux, None, weight_fn, microbatches)
  core.check_int("every", every, 1, 2**31 - 1)
  core.check_int("fragments", fragments, 1, 2**31 - 1)
  core.check_int("delay", delay, 0, 2**31 - 1)
  core.check_number("mix", mix, 0, 1, open_high=True)
  if parts is not None:
    core.check_callable("parts", parts)
  core.check_bool("mean_loss", mean_loss)
  core.check_choice("nonfinite", nonfinite, ("skip", "propagate"))
  core.check_bool("donate", donate)
  _init_state.check_axes(mesh, axis_name)
  core.check_choice("overlap", overlap, _sender.OVERLAPS)
  _check_schedule(every, fragments, delay)
  if overlap is not None and not delay:
    raise ValueError(
      f"`overlap` must be None without a `delay`, got {overlap!r}."
    )
  shardings = _shardings.Shardings(mesh, axis_name, specs)
  compute_work = _local_work.make_local_work(
    loss_fn,
    has_aux=has_aux,
    stateful=False,
    weight_fn=weight_fn,
    microbatches=microbatches,
  )
  rounds = _local_round.LocalRounds(
    inner=inner,
    outer=outer,
    axis_name=axis_name,
    every=every,
    fragments=fragments,
    delay=delay,
    mix=mix,
    parts=parts,
    skips=nonfinite == "skip",
    is_weighted=weight_fn is not None,
  )
  workers = math.prod(mesh.shape[name] for name in core.axis_names(axis_name))
  split = P(axis_name)

  @jax.jit
  def make_all(params: PyTree) -> _local_round.LocalState:
    params = jax.tree.map(lambda a: jnp.copy(a).astype(a.dtype), params)
    params = shardings.place(params, shardings.params(params))
    return _init_state.make_state(rounds.init, params, axis_name, shardings)

  def init(params: PyTree) -> _local_round.LocalState:
    core.check_arrays("params", params)
    _placement.check_trained(params)
    shardings.check_params(params)
    core.check_buffers({"params": params})
    rounds.divide(params)
    state = make_all(core.put_on_mesh(params, mesh, shardings.params(params)))
    if _placement.has_exchange(state.inner):
      raise ValueError(
        "`inner` must have no exchange, because each worker updates by itself, "
        "got one: it belongs to `outer`."
      )
    if workers > 1 and not _placement.has_exchange(state.outer):
      raise ValueError(
        "`outer` must have an exchange, got none: begin it with "
        "jaxmotion.exchange."
      )
    return state

  def train_own(
    params: core.PerWorker,
    inner_state: core.PerWorker,
    batch: PyTree,
    keys: PyTree,
  ) -> tuple[core.PerWorker, core.PerWorker, _local_work.LocalWork]:
    key = None if keys is None else keys[0]
    work = compute_work(core.unpack_worker(params), None, batch, key)
    loss = work.metrics[0] if has_aux else work.metrics
    update = optax.with_extra_args_support(inner).update

    def update_own(
      grads: PyTree, state: PyTree, own: PyTree
    ) -> tuple[PyTree, PyTree]:
      (updates, state), _ = run_with_loss(
        lambda extra_args: update(grads, state, own, **extra_args), {}, loss
      )
      return optax.apply_updates(own, updates), state

    work = jax.tree.map(lambda a: jnp.expand_dims(a, 0), work)
    own, new = _stacked_update.update_stacked(
      update_own, work.grads, inner_state.value, params.value
    )
    return core.PerWorker(own), core.PerWorker(new), work._replace(grads=None)

  def finish_own(
    state: _local_round.LocalState,
    params: core.PerWorker,
    inner_state: core.PerWorker,
    work: _local_work.LocalWork,
    extra_args: dict[str, Any],
  ) -> tuple[_local_round.LocalState, PyTree]:
    weight = None if work.weight is None else work.weight[0]
    metrics, _ = _averages.average_work(
      work, None, axis_name, model_state=None, mean_loss=mean_loss
    )
    with branch_after(metrics if mean_loss else None):
      state = rounds.finish_step(state, params, inner_state, weight, extra_args)
    return state, metrics

  def train(
    params: core.PerWorker,
    inner_state: core.PerWorker,
    count: Array,
    batch: PyTree,
    key: Array | None,
    placed: tuple[PyTree, PyTree] = (split, split),
  ) -> tuple[core.PerWorker, core.PerWorker, _local_work.LocalWork]:
    check_own((params, inner_state), {})
    batch_specs = _step_arguments.split_specs(
      "batch", batch, mesh, axis_name, microbatches
    )
    _step_keys.check_step_key(key)
    keys = None
    if key is not None:
      keys = _step_keys.make_worker_keys(
        jax.random.fold_in(key, count), (), workers
      )
    args = shardings.place(
      (params, inner_state, batch, keys), (*placed, batch_specs, split)
    )
    in_specs = (split, split, batch_specs, split)
    return core.map_local_work(train_own, mesh, axis_name, in_specs)(*args)

  def check_own(state: PyTree, extra_args: dict[str, Any]) -> None:
    _check_workers(state, workers, mesh.size)
    if "weight" in extra_args:
      raise ValueError(
        "`weight` must not be given, because `weight_fn` makes it, got "
        f"{extra_args['weight']!r}."
      )

  def step(
    state: _local_round.LocalState,
    batch: PyTree,
    *,
    key: Array | None = None,
    **extra_args: Any,
  ) -> tuple[_local_round.LocalState, PyTree]:
    core.check_instance(
      "state", state, _local_round.LocalState, "what `init` returned"
    )
    core.check_arrays("state", state)
    check_own(state.outer, extra_args)
    placed: Any = shardings.state(state, state.anchor)
    own: Any = core.state_specs(state, axis_name)
    # Two maps, as in `data_parallel`: only the second checks what varies.
    params, inner_state, work = train(
      state.params,
      state.inner,
      state.count,
      batch,
      key,
      (placed.params, placed.inner),
    )
    state, extra_args = shardings.place((state, extra_args), (placed, P()))
    metric_specs = _averages.find_metric_specs(
      work.metrics, axis_name, mean_loss
    )
    state, metrics = jax.shard_map(
      finish_own,
      in_specs=(own, own.params, own.inner, split, P()),
      out_specs=(own, metric_specs),
      **shardings.map_options,
    )(state, params, inner_state, work, extra_args)
    return shardings.place(state, placed), metrics

  call = None
  if delay and _sender.choose_overlap(mesh, axis_name, overlap) == "thread":
    call = _local_flights.make_threaded_step(
      rounds,
      train,
      _sender.Sender(mesh),
      shardings,
      mean_loss=mean_loss,
      check=check_own,
      donate=donate,
    )
  maker = _state_maker.StateMaker(rounds.init, divide=rounds.divide)
  run = _compiled_step.compile_step(
    step, ("state", "batch"), mesh, donate, call
  )
  return maker.attach(init), run


def _check_workers(state: PyTree, workers: int, devices: int) -> None:
  """Raises unless per-worker state is that of a number of workers."""
  try:
    check_rows(state, [workers, devices])
  except ValueError as error:
    raise ValueError(
      f"`state` must be that of {workers} workers, which `checkpoint.resize` "
      f"makes of another. {error}"
    ) from None


def _check_schedule(every: int, fragments: int, delay: int) -> None:
  """Raises unless fragments take turns, and land before they are sent again."""
  if every % fragments:
    raise ValueError(
      f"`fragments` must divide `every`, {every}, got {fragments}."
    )
  if delay >= every:
    raise ValueError(
      f"`delay` must be less than `every`, {every}, so that a fragment lands "
      f"before it is sent again, got {delay}."
    )
