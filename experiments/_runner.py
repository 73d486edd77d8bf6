"""One job: every exchange with every seed, on the same batches."""

import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import optax
from flax import nnx
from ml_collections import ConfigDict

import jaxmotion
from experiments import _exchanges
from experiments._checkpoint import Run, Store, Workdir
from experiments._progress import Display
from experiments._tasks import Batch, Task
from jaxmotion import wire

Params = Any
OptState = Any


def make_mesh(workers: int) -> jax.sharding.Mesh:
  """A mesh of ``workers`` devices along ``"data"``.

  CPU devices are emulated, as many as asked for, when the machine has fewer
  devices than workers. Call it before anything else asks JAX for a device.

  Args:
    workers: how many.

  Raises:
    RuntimeError: if JAX has already started with too few devices.
  """
  try:
    jax.config.update("jax_num_cpu_devices", workers)
  except RuntimeError:
    pass  # Already started: what is there may still be enough.
  devices = jax.devices()
  if len(devices) < workers:
    devices = jax.devices("cpu")
  if len(devices) < workers:
    raise RuntimeError(
      "`config.workers` must be at most the devices JAX has started with, got"
      f" {workers} for {len(devices)}."
    )
  return jax.make_mesh(
    (workers,),
    ("data",),
    axis_types=(jax.sharding.AxisType.Auto,),
    devices=devices[:workers],
  )


def make_optimizer(config: ConfigDict) -> optax.GradientTransformation:
  """The optimiser behind the exchange, with a schedule that ends at zero.

  Args:
    config: with ``optimizer`` (``adamw`` or ``sgd``), ``learning_rate``,
      ``warmup_steps``, ``steps``, ``momentum`` and ``weight_decay``.

  Raises:
    ValueError: if ``config.optimizer`` is neither.
  """
  schedule = optax.warmup_cosine_decay_schedule(
    0.0, config.learning_rate, config.warmup_steps, config.steps
  )
  match config.optimizer:
    case "adamw":
      return optax.adamw(
        schedule, b1=config.momentum, weight_decay=config.weight_decay
      )
    case "sgd":
      return optax.chain(
        optax.add_decayed_weights(config.weight_decay),
        optax.sgd(schedule, momentum=config.momentum, nesterov=True),
      )
  raise ValueError(
    f"`config.optimizer` must be adamw or sgd, got {config.optimizer!r}."
  )


def make_score(task: Task) -> Callable[[Params], float]:
  """A function that scores parameters on the held-out data."""
  graph = nnx.graphdef(task.build(0))

  @jax.jit
  def hits(params: Params, batch: Batch) -> jax.Array:
    return task.hits(nnx.merge(graph, params), batch)

  def score(params: Params) -> float:
    # One worker's copy: scoring on all of them would repeat the same work.
    local = jax.tree.map(lambda x: x.addressable_data(0), params)
    return sum(float(hits(local, b)) for b in task.test()) / task.items

  return score


class Trainer:
  """One exchange: compiled at the first step, used for every seed.

  Args:
    config: of the job.
    task: what is learnt.
    mesh: with an axis ``"data"``.
    exchange: case name.
    score: made by ``make_score``; shared between exchanges.
  """

  def __init__(
    self,
    config: ConfigDict,
    task: Task,
    mesh: jax.sharding.Mesh,
    exchange: str,
    score: Callable[[Params], float],
  ):
    self._config = config
    self._task = task
    self._exchange = exchange
    self._score = score
    graph = nnx.graphdef(task.build(0))

    def loss(params: Params, batch: Batch) -> jax.Array:
      return task.loss(nnx.merge(graph, params), batch)

    tx = optax.chain(
      jaxmotion.exchange("data", _exchanges.get_exchange(exchange), seed=0),
      make_optimizer(config),
    )
    self._init, self._step = jaxmotion.data_parallel(
      loss, tx, mesh, axis_name="data"
    )

  def init(self, seed: int) -> tuple[Params, OptState]:
    """Parameters and optimiser state of a seed, placed on the mesh."""
    state = nnx.state(self._task.build(seed), nnx.Param)
    return self._init(nnx.to_pure_dict(state))

  def train(
    self,
    seed: int,
    *,
    store: Store | None = None,
    stop: int | None = None,
    on_step: Callable[[int, float], None] = lambda step, loss: None,
  ) -> tuple[Params, OptState, Run | None]:
    """Trains one seed, from its latest checkpoint if there is one.

    Args:
      seed: of the initial parameters and of the batches.
      store: where checkpoints are read and written, if anywhere.
      stop: ends early after this step, as a killed job would.
      on_step: called with the number of steps done and the loss.

    Returns:
      Parameters, optimiser state, and the measurements if the run is done.

    Raises:
      FloatingPointError: if the loss is not finite.
    """
    params, state = self.init(seed)
    wire_bytes = wire.step_bytes(
      self._step, params, state, self._task.batch(seed, 0)
    ).total_bytes
    start, loss, times = 0, float("nan"), []
    if store:
      start, (params, state) = store.restore((params, state))
    steps = self._config.steps
    for step in range(start, min(steps, stop or steps)):
      batch = self._task.batch(seed, step)
      begin = time.perf_counter()
      params, state, loss_array = self._step(params, state, batch)
      loss = float(loss_array)
      times.append(time.perf_counter() - begin)
      self._check_finite(loss, seed, step)
      on_step(step + 1, loss)
      if store and self._is_checkpoint(step + 1):
        store.save(step + 1, (params, state))
    if stop is not None and stop < steps:
      return params, state, None
    run = Run(
      exchange=self._exchange,
      seed=seed,
      score=self._score(params),
      loss=loss,
      wire_bytes=wire_bytes,
      step_ms=1e3 * statistics.median(times[1:] or times or [float("nan")]),
    )
    return params, state, run

  def _check_finite(self, loss: float, seed: int, step: int) -> None:
    if not np.isfinite(loss):
      raise FloatingPointError(
        f"loss must be finite, got {loss} at step {step} of"
        f" {self._exchange}, seed {seed}; a lower `config.learning_rate` or"
        " more `config.warmup_steps` may help."
      )

  def _is_checkpoint(self, done: int) -> bool:
    every = self._config.checkpoint_every
    return done % every == 0 or done == self._config.steps


def run_job(
  config: ConfigDict,
  task: Task,
  mesh: jax.sharding.Mesh,
  *,
  workdir: Workdir | None = None,
  display: Display | None = None,
) -> list[Run]:
  """Runs what ``config`` asks for, except what ``workdir`` already has.

  Seeds are the outer loop, so that a slow minute of the machine falls on all
  exchanges alike.

  Args:
    config: of the job.
    task: what is learnt.
    mesh: with an axis ``"data"``.
    workdir: where to keep checkpoints and finished runs, if anywhere.
    display: what to tell of the progress, if anything.

  Returns:
    One ``Run`` for each exchange and seed that ``config`` names.
  """
  done = (
    {(r.exchange, r.seed): r for r in workdir.finished()} if workdir else {}
  )
  wanted = [(e, s) for s in config.seeds for e in config.exchanges]
  score = make_score(task)
  trainers = {
    exchange: Trainer(config, task, mesh, exchange, score)
    for exchange in config.exchanges
  }
  for exchange, seed in wanted:
    if (exchange, seed) in done:
      continue
    store = workdir.store(exchange, seed) if workdir else None
    on_step = display.begin(exchange, seed) if display else lambda *_: None
    _, _, run = trainers[exchange].train(seed, store=store, on_step=on_step)
    done[exchange, seed] = run
    if store:
      store.close()
      workdir.finish(run)
    if display:
      display.end(run)
  return [done[key] for key in wanted]
