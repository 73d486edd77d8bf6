"""Training of one exchange: compiled once, trained with every seed."""

import math
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from flax import nnx
from ml_collections import ConfigDict

import jaxmotion
from experiments.common import console, distributed, loop
from experiments.common.checkpoint import CheckpointStore, Elastic, Log
from experiments.common.loop import OnStep
from experiments.common.progress import ScalarWriter
from experiments.common.workdir import Run
from experiments.train import cases, optimizer
from experiments.train.mesh import DEVICE_AXIS, Mesh
from experiments.train.tasks import Batch, Task
from jaxmotion import checkpoint, wire

_SCALARS_EVERY = 10  # Steps: reading a state takes a program of its own.

Params = Any


def make_score(task: Task) -> Callable[[Params], float]:
  """Returns a function that scores parameters on the held-out data."""
  graph = nnx.graphdef(task.build(0))

  @jax.jit
  def score_sum(params: Params, batch: Batch) -> jax.Array:
    return task.score_sum(nnx.merge(graph, params), batch)

  def score(params: Params) -> float:
    # One worker's copy: scoring on all of them would repeat the same work.
    local = jax.tree.map(lambda x: x.addressable_data(0), params)
    total = sum(float(score_sum(local, batch)) for batch in task.test())
    return total / task.score_divisor

  return score


class Trained(NamedTuple):
  """State of a run after its last step."""

  state: jaxmotion.TrainState  # Parameters and optimizer state, on the mesh.
  log: Log  # Loss and time of the steps so far.


class Program(NamedTuple):
  """A compiled training step and the bytes it sends."""

  # Maps (state, batch) to (state, loss).
  step: Callable[
    [jaxmotion.TrainState, Batch], tuple[jaxmotion.TrainState, jax.Array]
  ]
  # Bytes that one worker sends in one step, by the traced program, without what
  # stays within a host.
  wire_bytes: int
  compiled_bytes: int  # The same bytes, by the compiled program.
  compile_s: float  # Seconds to trace and compile the step.


def compile_step(
  step: Any, *args: Any, branches: Sequence[int | None] = (None,)
) -> Program:
  """Compiles a jitted step for these arguments, and counts what it sends."""
  begin = time.perf_counter()
  compiled = step.lower(*args).compile()
  compile_s = time.perf_counter() - begin
  sent = np.zeros(2)
  for branch in branches:
    traced = wire.step_bytes(step, *args, branch=branch)
    found = wire.compiled_bytes(compiled, branch=branch)
    # Compiled programs name no mesh axes, so bytes within a host are counted
    # in the traced program.
    local = traced.select(axes=(DEVICE_AXIS,)).total_bytes
    sent += traced.total_bytes - local, found.total_bytes - local
  predicted, counted = np.round(sent / len(branches)).astype(int).tolist()
  return Program(compiled, predicted, counted, compile_s)


class Trainer:
  """Training of one exchange, compiled at the first step for all seeds."""

  def __init__(self, config: ConfigDict, task: Task, mesh: Mesh, exchange: str):
    self._config = config
    self._task = task
    self._exchange = exchange
    graph = nnx.graphdef(task.build(0))

    def loss(params: Params, batch: Batch) -> jax.Array:
      return task.loss(nnx.merge(graph, params), batch)

    tx = cases.exchange_with(
      mesh,
      exchange,
      optimizer.make_optimizer(config),
      optimizer.make_settings(config),
    )
    workers = cases.find_axes(mesh)
    self._init, self._step = jaxmotion.make_train_step(
      loss, tx, mesh, axis_name=workers
    )
    self._mesh, self._workers = mesh, workers
    self._rows = jax.sharding.NamedSharding(mesh, jax.P(mesh.axis_names))
    self.program: Program | None = None

  def train_seed(
    self,
    seed: int,
    *,
    store: CheckpointStore | None = None,
    stop: int | None = None,
    on_step: OnStep = loop.ignore_step,
    writer: ScalarWriter | None = None,
  ) -> Trained:
    """Trains one seed, from its latest checkpoint if there is one."""
    initial = nnx.state(self._task.build(seed), nnx.Param)
    # On the host: arrays of one device are not those of all processes.
    state = self._init(jax.tree.map(np.asarray, nnx.to_pure_dict(initial)))
    if self.program is None:
      first = self._load_batch(seed, 0)
      branches = cases.settled_branches(self._exchange)
      self.program = compile_step(self._step, state, first, branches=branches)
      distributed.wait_for_processes(f"{self._exchange} is compiled")
    program = self.program

    def step(state: Any, batch: Batch) -> tuple[Any, float]:
      state, loss = program.step(state, batch)
      return state, float(loss)

    def watch(done: int, state: jaxmotion.TrainState) -> None:
      if writer and done % _SCALARS_EVERY == 0:
        writer.write(done, jaxmotion.metrics(state.opt_state, self._mesh))

    def log_step(done: int, loss: float) -> None:
      if writer and done % _SCALARS_EVERY == 0:
        writer.write(done, {"loss": loss})
      on_step(done, loss)

    state, log = loop.run_steps(
      state,
      step,
      lambda index: self._load_batch(seed, index),
      steps=self._config.steps,
      checkpoint_every=self._config.checkpoint_every,
      store=store,
      elastic=None if store is None else self._make_elastic(state.params),
      stop=stop,
      evaluate=watch,
      on_step=log_step,
    )
    if log.loss and not math.isfinite(log.loss[-1]):
      raise FloatingPointError(
        f"loss must be finite, got {log.loss[-1]} at step"
        f" {len(log.loss) - 1} of {self._exchange}, seed {seed}; a lower"
        " `config.learning_rate` or more `config.warmup_steps` may help."
      )
    return Trained(state, log)

  def summarize_run(
    self, seed: int, trained: Trained, score: Callable[[Params], float]
  ) -> Run:
    """Returns score, loss, bytes and times of a run that is done."""
    assert self.program is not None
    return Run(
      exchange=self._exchange,
      seed=seed,
      score=score(trained.state.params),
      loss=trained.log.loss[-1],
      wire_bytes=self.program.wire_bytes,
      compiled_bytes=self.program.compiled_bytes,
      compile_s=self.program.compile_s,
      step_ms=statistics.median(trained.log.step_ms),
    )

  def _make_elastic(self, params: Params) -> Elastic:
    """Returns how this job continues what other workers have saved."""
    init, mesh, axes = self._init, self._mesh, self._workers
    likes = jax.eval_shape(lambda: params)

    def like_saved(layout: Any) -> jaxmotion.TrainState:
      saved = checkpoint.Layout.from_dict(layout)
      like = checkpoint.saved_like(init, likes, saved, mesh, axis_name=axes)
      return jaxmotion.TrainState(params, None, like)

    def resize(
      state: jaxmotion.TrainState, layout: Any
    ) -> jaxmotion.TrainState:
      saved = checkpoint.Layout.from_dict(layout)
      before = math.prod(count for _, count in saved.workers)
      console.print_notice(
        f"{self._exchange}: a state of {before} workers continues on"
        f" {mesh.size}."
      )
      resized = checkpoint.resize(
        init, state.opt_state, likes, saved, mesh, axis_name=axes
      )
      return state._replace(opt_state=resized)

    layout = checkpoint.describe_state(init, likes, mesh, axis_name=axes)
    return Elastic(layout.to_dict(), like_saved, resize)

  def _load_batch(self, seed: int, step: int) -> Any:
    """Returns the batch of all workers; a process of several feeds its rows."""
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
