"""Training of one case: compiled once, trained with every seed."""

import functools
import math
import statistics
from typing import Any, NamedTuple

import jax
import numpy as np
import optax

from experiments.common import checkpoint, loop
from experiments.train import tasks
from experiments.weights import cases
from experiments.weights.context import RunContext
from experiments.weights.model import Model, Tree, count_correct
from jaxmotion import codecs, controllers, memory

# Biases and norms travel as they are, as in the paper; the other weights of a
# stage share one precision.
GROUPS = ((r"bias|scale", None), (r"(.*?)/", r"\1"))


def make_store(
  case: cases.Case, tx: optax.GradientTransformation, model: Model
) -> memory.HostResident:
  """Returns the host-resident store of a case."""
  return memory.HostResident(
    model.stages,
    tx,
    weights=case.weights,
    grads=case.grads,
    send_difference=case.delta,
    groups=GROUPS,
    min_leaf_size=0,
    stateful=True,
  )


def make_signal(
  case: cases.Case,
  store: memory.HostResident,
  state: memory.HostState,
  level: np.ndarray | int,
) -> jax.Array:
  """Returns the input of a case's controller: norms or relative errors."""
  if case.control == "budget":
    return store.errors(state, level)
  return store.norms(state)


def received_weights(
  case: cases.Case,
  store: memory.HostResident,
  state: memory.HostState,
  level: np.ndarray,
) -> Tree:
  """Returns the weights that the device computes with."""
  # They are those of the next step. A case that sends differences has them on
  # the device already.
  groups = store.groups_of(state.params)
  parts = groups.split(state.params)
  if case.delta:
    # A group is a stage, and both are in the order of their names.
    reference = iter(jax.tree.leaves(state.device_reference))
    received = [[next(reference) for _ in part] for part in parts]
  else:
    received = [
      [_round_trip(case.weights[own], x) for x in part]
      for own, part in zip(level, parts, strict=True)
    ]
  return groups.merge(received, state.params)


@functools.partial(jax.jit, static_argnums=0)
def _round_trip(codec: codecs.Codec, x: jax.Array) -> jax.Array:
  return codec.decode(codec.encode(x)[0], x)


class Run(NamedTuple):
  """Record of one finished run."""

  case: str  # Name of the case.
  seed: int  # Seed of the run.
  error: float  # Error on the held-out data at the end, in per cent.
  loss: float  # Loss of the last training step.
  # Number of steps; fewer than `config.steps` if the loss was not finite.
  steps: int
  curve: list  # [steps done, error in per cent] of every evaluation.
  plain_bytes: int  # Bytes of the parameters as float32.
  sent_bytes: float  # Bytes to the device, mean over the steps.
  returned_bytes: float  # Bytes to the host, mean over the steps.
  step_ms: float  # Median time of a step.
  # Largest relative error of a group's weights on the device against the
  # host's, at the end.
  weight_error: float
  groups: list  # Names of the groups that have one level each.
  # [steps done, group, level] of every change, the start included.
  switches: list


class RunState(NamedTuple):
  """State of a run between two steps."""

  state: memory.HostState  # State of the host-resident store.
  control: Any  # State of the controller.
  # float64[evaluations], per cent; NaN where there was none yet.
  errors: np.ndarray


class Trainer:
  """Training of one case, compiled at the first step for all seeds."""

  def __init__(self, context: RunContext, name: str):
    self._context, self._name = context, name
    model = context.make_model(0)
    self._case = cases.get_case(name)
    self.store = make_store(self._case, context.tx, model)
    self._stages = model.stages
    self._controller = cases.make_controller(self._case, context.config)
    self._update = jax.jit(self._controller.update)
    self._interval = cases.control_interval(self._case, context.config)

  def train_seed(
    self,
    seed: int,
    *,
    store: checkpoint.CheckpointStore | None = None,
    stop: int | None = None,
    on_step: loop.OnStep = loop.ignore_step,
  ) -> tuple[RunState, checkpoint.Log]:
    """Trains one seed, from its latest checkpoint if there is one."""
    # A run whose loss is not finite ends after that step.
    config = self._context.config

    def evaluate(done: int, run: RunState) -> None:
      if done % config.eval_every == 0:
        run.errors[done // config.eval_every - 1] = self.test_error(run)

    return loop.run_steps(
      self._init_run(seed),
      self._step,
      lambda index: self._context.batch(seed, index),
      steps=config.steps,
      checkpoint_every=config.checkpoint_every,
      store=store,
      stop=stop,
      evaluate=evaluate,
      on_step=on_step,
    )

  def level(self, run: RunState) -> np.ndarray:
    """Returns the levels of the next step, int array `(groups,)`."""
    return np.asarray(self._controller.level(run.control))

  def test_error(self, run: RunState) -> float:
    """Returns the share of misclassified held-out images, in per cent."""
    params = received_weights(
      self._case, self.store, run.state, self.level(run)
    )
    params = jax.device_put(params, jax.local_devices()[0])
    correct = sum(
      float(count_correct(self._stages, params, run.state.stats, batch))
      for batch in self._context.test()
    )
    return 100 * (1 - correct / len(self._context.data.test.labels))

  def summarize_run(self, seed: int, run: RunState, log: checkpoint.Log) -> Run:
    """Returns error, bytes and times of a run that is done."""
    every = self._context.config.eval_every
    steps = len(log.loss)
    state, level = run.state, self.level(run)
    return Run(
      case=self._name,
      seed=seed,
      error=self.test_error(run),
      loss=log.loss[-1],
      steps=steps,
      curve=[
        [(i + 1) * every, float(e)]
        for i, e in enumerate(run.errors)
        if not math.isnan(e)
      ],
      plain_bytes=self.store.plain_bytes(state.params),
      sent_bytes=int(state.sent_bytes) / steps,
      returned_bytes=int(state.returned_bytes) / steps,
      step_ms=statistics.median(log.step_ms),
      weight_error=float(np.max(self.store.errors(state, level))),
      groups=list(self.store.groups_of(state.params).names),
      switches=[
        [self._interval * s.step, s.group, s.level]
        for s in controllers.level_changes(run.control.history)
      ],
    )

  def _init_run(self, seed: int) -> RunState:
    """Returns the state before the first step of a seed."""
    model = self._context.make_model(seed)
    state = self.store.init(model.params, model.stats)
    config = self._context.config
    errors = np.full(config.steps // config.eval_every, np.nan)
    # Controllers other than AWP read only the number of groups.
    control = jax.jit(self._controller.init)(self.store.norms(state))
    return RunState(state, control, errors)

  def _step(self, run: RunState, batch: tasks.Batch) -> tuple[RunState, float]:
    """Trains one batch, and updates the controller when it is due."""
    level = self.level(run)
    state, loss = self.store.step(run.state, batch, level)
    control = run.control
    if self._case.control and int(state.step) % self._interval == 0:
      signal = make_signal(self._case, self.store, state, level)
      control = self._update(signal, control)
    jax.block_until_ready((state.params, control))
    return run._replace(state=state, control=control), float(loss)
