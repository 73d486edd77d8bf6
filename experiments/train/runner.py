"""One job: every exchange with every seed, on the same batches."""

import contextlib
import math
import os
import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np
import optax
from flax import nnx
from ml_collections import ConfigDict

import jaxmotion
from experiments.common.checkpoint import Log, Run, Store, Workdir
from experiments.common.progress import Display
from experiments.train import exchanges
from experiments.train.tasks import Batch, Task
from jaxmotion import wire
from jaxmotion.codecs import Codec

Mesh = jax.sharding.Mesh
Params = Any
OptState = Any

_DEVICE_AXIS = "device"  # Of a mesh of hosts with several devices.
_EMULATED = "xla_force_host_platform_device_count"  # The other way to ask.


def make_mesh(workers: int, processes: int = 1) -> Mesh:
  """A mesh of `workers` devices.

  Along `"data"` in one process. In several, each has an equal share of the
  workers: along `"host"` if that is one device each, else along `"host"` and
  `"device"`.

  CPU devices are emulated, as many as asked for, when the machine has fewer
  devices than workers. Call it before anything else asks JAX for a device.

  Args:
    workers: how many, over all processes.
    processes: how many run this job together.

  Raises:
    ValueError: if the processes do not divide the workers.
    RuntimeError: if JAX has already started with too few devices.
  """
  if workers % processes:
    raise ValueError(
      f"`config.workers` must be a multiple of the {processes} processes, got"
      f" {workers}."
    )
  share = workers // processes
  if _EMULATED not in os.environ.get("XLA_FLAGS", ""):
    with contextlib.suppress(RuntimeError):  # Started: it may still do.
      jax.config.update("jax_num_cpu_devices", share)
  if processes > 1:
    return _mesh_of_processes(share, processes)
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


def _mesh_of_processes(share: int, processes: int) -> Mesh:
  rows = [
    [d for d in jax.devices() if d.process_index == index][:share]
    for index in range(processes)
  ]
  least = min(map(len, rows))
  if least < share:
    raise RuntimeError(
      "`config.workers` must be at most the devices of all processes, got"
      f" {share} a process for {least}."
    )
  if share == 1:
    return Mesh(np.array(rows)[:, 0], ("host",))
  return Mesh(np.array(rows), ("host", _DEVICE_AXIS))


def make_optimizer(config: ConfigDict) -> optax.GradientTransformation:
  """The optimiser behind the exchange, with a schedule that ends at zero.

  Args:
    config: with `optimizer` (`adamw`, `sgd` or `momentum`, which is sgd
      without Nesterov's step), `learning_rate`, `warmup_steps`, `steps`,
      `momentum` and `weight_decay`.

  Raises:
    ValueError: if `config.optimizer` is none, or the warm-up is too long.
  """
  if not 0 <= config.warmup_steps < config.steps:
    raise ValueError(
      "`config.warmup_steps` must be at least 0 and less than `config.steps` ="
      f" {config.steps}, got {config.warmup_steps}."
    )
  schedule = optax.warmup_cosine_decay_schedule(
    0.0, config.learning_rate, config.warmup_steps, config.steps
  )
  match config.optimizer:
    case "adamw":
      return optax.adamw(
        schedule, b1=config.momentum, weight_decay=config.weight_decay
      )
    case "sgd" | "momentum":
      nesterov = config.optimizer == "sgd"
      return optax.chain(
        optax.add_decayed_weights(config.weight_decay),
        optax.sgd(schedule, momentum=config.momentum, nesterov=nesterov),
      )
  raise ValueError(
    "`config.optimizer` must be adamw, sgd or momentum, got"
    f" {config.optimizer!r}."
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


def _ignore(done: int, loss: float) -> None:
  pass


class Trained(NamedTuple):
  """Where a run stands.

  Attributes:
    params: of the model, on the mesh.
    state: of the optimiser, with the codec's error memory of every worker.
    log: of the steps so far.
  """

  params: Params
  state: OptState
  log: Log


class Program(NamedTuple):
  """A compiled training step.

  Attributes:
    step: maps (params, state, batch) to the same and the loss.
    wire_bytes: what one worker sends in one step, by the traced program,
      without what stays within a host.
    compiled_bytes: the same, by the compiled program.
    compile_s: time to trace and compile it.
  """

  step: Callable[[Params, OptState, Batch], tuple[Params, OptState, jax.Array]]
  wire_bytes: int
  compiled_bytes: int
  compile_s: float


def compile_step(step: Any, *args: Any) -> Program:
  """Compiles a jitted step for these arguments and reads what it sends."""
  begin = time.perf_counter()
  compiled = step.lower(*args).compile()
  compile_s = time.perf_counter() - begin
  traced = wire.step_bytes(step, *args)
  # A compiled program does not say which of its bytes these are.
  local = traced.select(axes=(_DEVICE_AXIS,)).total_bytes
  return Program(
    compiled,
    round(traced.total_bytes - local),
    round(wire.compiled_bytes(compiled).total_bytes - local),
    compile_s,
  )


def _exchange_over(mesh: Mesh, codec: Codec) -> optax.GradientTransformation:
  """The exchange over all axes of a mesh: within hosts first, if it can."""
  outer, *inner = mesh.axis_names
  if inner:
    return jaxmotion.exchange(outer, codec, local_axis=tuple(inner))
  return jaxmotion.exchange(outer, codec)


class Trainer:
  """One exchange: compiled at the first step, used for every seed.

  Args:
    config: of the job.
    task: what is learnt.
    mesh: made by `make_mesh`.
    exchange: case name.
  """

  def __init__(self, config: ConfigDict, task: Task, mesh: Mesh, exchange: str):
    self._config = config
    self._task = task
    self._exchange = exchange
    graph = nnx.graphdef(task.build(0))

    def loss(params: Params, batch: Batch) -> jax.Array:
      return task.loss(nnx.merge(graph, params), batch)

    tx = optax.chain(
      _exchange_over(mesh, exchanges.get_exchange(exchange)),
      make_optimizer(config),
    )
    outer, *inner = mesh.axis_names
    workers = mesh.axis_names if inner else outer
    self._init, self._step = jaxmotion.data_parallel(
      loss, tx, mesh, axis_name=workers
    )
    self._rows = jax.sharding.NamedSharding(mesh, jax.P(workers))
    self.program: Program | None = None

  def train(
    self,
    seed: int,
    *,
    store: Store | None = None,
    stop: int | None = None,
    on_step: Callable[[int, float], None] = _ignore,
  ) -> Trained:
    """Trains one seed, from its latest checkpoint if there is one.

    Args:
      seed: of the initial parameters and of the batches.
      store: where checkpoints are read and written, if anywhere.
      stop: ends after this step instead of `config.steps`.
      on_step: called with the number of steps done and the loss.

    Raises:
      FloatingPointError: if the loss is not finite.
    """
    at_start = nnx.state(self._task.build(seed), nnx.Param)
    # On the host: arrays of one device are not those of all processes.
    params, state = self._init(
      jax.tree.map(np.asarray, nnx.to_pure_dict(at_start))
    )
    if self.program is None:
      first = self._batch(seed, 0)
      self.program = compile_step(self._step, params, state, first)
    log = Log([], [])
    if store:
      (params, state), log = store.restore((params, state))
    end = self._config.steps if stop is None else stop
    for step in range(len(log.loss), end):
      batch = self._batch(seed, step)
      begin = time.perf_counter()
      params, state, device_loss = self.program.step(params, state, batch)
      loss = float(device_loss)
      log.step_ms.append(1e3 * (time.perf_counter() - begin))
      log.loss.append(loss)
      self._check_finite(loss, seed, step)
      if store and self._is_checkpoint(step + 1):
        store.save((params, state), log)
      on_step(step + 1, loss)
    return Trained(params, state, log)

  def _batch(self, seed: int, step: int) -> Any:
    """The batch of all workers; of several processes, each feeds its rows."""
    batch = self._task.batch(seed, step)
    count = jax.process_count()
    if count == 1:
      return batch

    def feed(rows: np.ndarray) -> jax.Array:
      share = len(rows) // count
      begin = jax.process_index() * share
      return jax.make_array_from_process_local_data(
        self._rows, rows[begin : begin + share], rows.shape
      )

    return jax.tree.map(feed, batch)

  def measure(
    self, seed: int, trained: Trained, score: Callable[[Params], float]
  ) -> Run:
    """What a run that is done has shown."""
    assert self.program is not None
    return Run(
      exchange=self._exchange,
      seed=seed,
      score=score(trained.params),
      loss=trained.log.loss[-1],
      wire_bytes=self.program.wire_bytes,
      compiled_bytes=self.program.compiled_bytes,
      compile_s=self.program.compile_s,
      step_ms=statistics.median(trained.log.step_ms),
    )

  def _check_finite(self, loss: float, seed: int, step: int) -> None:
    if not math.isfinite(loss):
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
  mesh: Mesh,
  *,
  workdir: Workdir | None = None,
  display: Display | None = None,
) -> list[Run]:
  """Runs what `config` asks for, except what `workdir` already has.

  Seeds are the outer loop, so that a slow minute of the machine falls on all
  exchanges alike.

  Args:
    config: of the job.
    task: what is learnt.
    mesh: made by `make_mesh`.
    workdir: where to keep checkpoints and finished runs, if anywhere.
    display: what to tell of the progress, if anything.

  Returns:
    One `Run` for each exchange and seed that `config` names.
  """
  finished = workdir.finished() if workdir else []
  done = {(run.exchange, run.seed): run for run in finished}
  wanted = [(e, s) for s in config.seeds for e in config.exchanges]
  score = make_score(task)
  trainers = {
    name: Trainer(config, task, mesh, name) for name in config.exchanges
  }
  for exchange, seed in wanted:
    if (exchange, seed) not in done:
      trainer = trainers[exchange]
      on_step = display.begin(exchange, seed) if display else _ignore
      store = workdir.store(exchange, seed) if workdir else None
      trained = trainer.train(seed, store=store, on_step=on_step)
      run = trainer.measure(seed, trained, score)
      done[exchange, seed] = run
      if store:
        store.close()
      if workdir:
        workdir.finish(run)
      if display:
        display.end(exchange, seed, run.score, run.step_ms)
  return [done[key] for key in wanted]
