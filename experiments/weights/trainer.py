"""Training runs: every case with every seed, on the same batches."""

import functools
import math
import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np
import optax
from ml_collections import ConfigDict

from experiments.common.checkpoint import CheckpointStore, Log, Workdir
from experiments.common.progress import Display
from experiments.data import images
from experiments.models import staged
from experiments.train import tasks
from experiments.train.optimizer import make_optimizer
from experiments.weights import cases
from experiments.weights.model import Model, as_model, hits
from jaxmotion import codecs, memory
from jaxmotion.controllers import level_changes

Tree = Any

# Biases and norms travel as they are, as in the paper; the rest of a stage has
# one precision.
GROUPS = ((r"bias|scale", None), (r"(.*?)/", r"\1"))


class Run(NamedTuple):
  """What one finished run measured.

  Attributes:
    case: its name.
    seed: of the run.
    error: on the held-out data at the end, in per cent.
    loss: of the last training step.
    steps: taken; fewer than asked for if the loss was not finite.
    curve: [steps done, error in per cent], at every evaluation.
    plain_bytes: of the parameters as float32.
    sent_bytes: to the device, mean over the steps.
    returned_bytes: to the host, mean over the steps.
    step_ms: median time of a step.
    weight_error: greatest relative error of a group's weights on the device
      against the host's, at the end.
    groups: names.
    switches: [steps done, group, level], the start included.
  """

  case: str
  seed: int
  error: float
  loss: float
  steps: int
  curve: list
  plain_bytes: int
  sent_bytes: float
  returned_bytes: float
  step_ms: float
  weight_error: float
  groups: list
  switches: list


class Setup(NamedTuple):
  """What all runs of a job share.

  Attributes:
    config: of the job.
    tx: the optimiser.
    data: images of the size that the network takes.
    batch: the training batch of (seed, step).
    test: iterates over the test batches.
  """

  config: ConfigDict
  tx: optax.GradientTransformation
  data: images.ImageData
  batch: Callable[[int, int], tasks.Batch]
  test: Callable[[], Any]

  def model(
    self, seed: int, *, size: int | None = None, width: float | None = None
  ) -> Model:
    """The network, initialised from `seed`.

    Args:
      seed: of the initial parameters.
      size: of its images; that of the configuration if None.
      width: likewise.
    """
    stages = staged.build_stages(
      self.config.model,
      size=size or self.config.image_size,
      channels=self.data.train.pixels.shape[-1],
      classes=self.data.classes,
      width=width or self.config.width,
      seed=seed,
    )
    return as_model(stages)


class Trained(NamedTuple):
  """Where a run stands; a pytree but for its log.

  Attributes:
    state: of the host-resident store.
    control: the controller's state.
    errors: float64[evaluations], per cent; NaN where there was none yet.
    log: of the steps so far.
  """

  state: memory.HostState
  control: Tree
  errors: np.ndarray
  log: Log


def load(config: ConfigDict) -> Setup:
  """Reads the data a configuration names."""
  data = images.resize_images(images.load_images(config), config.image_size)
  batch, test = tasks.image_batches(data, config.batch_size)
  return Setup(config, make_optimizer(config), data, batch, test)


def make_store(
  case: cases.Case, tx: optax.GradientTransformation, model: Model
) -> memory.HostResident:
  """The store of a case.

  Args:
    case: what moves.
    tx: the optimiser; one object for all cases, so that they share programs.
    model: of any seed.
  """
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
  """What the controller of a case is told: norms or relative errors."""
  if case.control == "budget":
    return store.errors(state, level)
  return store.norms(state)


def arrived(
  case: cases.Case,
  store: memory.HostResident,
  state: memory.HostState,
  level: np.ndarray,
) -> Tree:
  """The weights that a device computes with.

  Those it would compute the next step with; of differences, those it holds.

  Args:
    case: whose.
    store: of the case.
    state: of the store.
    level: of every group.
  """
  groups = store.groups_of(state.params)
  parts = groups.split(state.params)
  if case.delta:
    # A group is a stage, and both are in the order of their names.
    held = iter(jax.tree.leaves(state.device_reference))
    there = [[next(held) for _ in part] for part in parts]
  else:
    there = [
      [_round_trip(case.weights[rung], x) for x in part]
      for rung, part in zip(level, parts, strict=True)
    ]
  return groups.merge(there, state.params)


@functools.partial(jax.jit, static_argnums=0)
def _round_trip(codec: codecs.Codec, x: jax.Array) -> jax.Array:
  return codec.decode(codec.encode(x)[0], x)


def _ignore(done: int, loss: float) -> None:
  pass


class Trainer:
  """One case: compiled at the first step, used for every seed.

  Args:
    setup: of the job.
    name: of the case.
  """

  def __init__(self, setup: Setup, name: str):
    self._setup, self._name = setup, name
    case = cases.get_case(name)
    model = setup.model(0)
    self.store = make_store(case, setup.tx, model)
    self._stages = model.stages
    self._case = case
    self._controller = cases.make_controller(case, setup.config)
    self._update = jax.jit(self._controller.update)
    self._every = cases.control_every(case, setup.config)

  def train(
    self,
    seed: int,
    *,
    checkpoints: CheckpointStore | None = None,
    stop: int | None = None,
    on_step: Callable[[int, float], None] = _ignore,
  ) -> Trained:
    """Trains one seed, from its latest checkpoint if there is one.

    A run whose loss is not finite ends there.

    Args:
      seed: of the initial parameters and of the batches.
      checkpoints: where they are read and written, if anywhere.
      stop: ends after this step instead of `config.steps`.
      on_step: called with the number of steps done and the loss.
    """
    config = self._setup.config
    run = self._start(seed)
    if checkpoints:
      (state, control, errors), log = checkpoints.restore(run[:3])
      run = Trained(state, control, errors, log)
    end = config.steps if stop is None else stop
    for step in range(len(run.log.loss), end):
      run = self._step(run, self._setup.batch(seed, step))
      loss = run.log.loss[-1]
      if not math.isfinite(loss):
        break
      if (step + 1) % config.eval_every == 0:
        run.errors[(step + 1) // config.eval_every - 1] = self.error(run)
      if checkpoints and self._is_checkpoint(step + 1):
        checkpoints.save(run[:3], run.log)
      on_step(step + 1, loss)
    return run

  def level(self, run: Trained) -> np.ndarray:
    """The levels of the next step."""
    return np.asarray(self._controller.level(run.control))

  def error(self, run: Trained) -> float:
    """The share of held-out images that are classified wrong, in per cent."""
    params = arrived(self._case, self.store, run.state, self.level(run))
    params = jax.device_put(params, jax.local_devices()[0])
    right = sum(
      float(hits(self._stages, params, run.state.stats, batch))
      for batch in self._setup.test()
    )
    return 100 * (1 - right / len(self._setup.data.test.labels))

  def measure(self, seed: int, run: Trained) -> Run:
    """What a run that is done has shown."""
    every = self._setup.config.eval_every
    steps = len(run.log.loss)
    state, level = run.state, self.level(run)
    return Run(
      case=self._name,
      seed=seed,
      error=self.error(run),
      loss=run.log.loss[-1],
      steps=steps,
      curve=[
        [(i + 1) * every, float(e)]
        for i, e in enumerate(run.errors)
        if not math.isnan(e)
      ],
      plain_bytes=self.store.plain_bytes(state.params),
      sent_bytes=int(state.sent_bytes) / steps,
      returned_bytes=int(state.returned_bytes) / steps,
      step_ms=statistics.median(run.log.step_ms),
      weight_error=float(np.max(self.store.errors(state, level))),
      groups=list(self.store.groups_of(state.params).names),
      switches=[
        [self._every * s.step, s.group, s.level]
        for s in level_changes(run.control.history)
      ],
    )

  def _start(self, seed: int) -> Trained:
    model = self._setup.model(seed)
    state = self.store.init(model.params, model.stats)
    config = self._setup.config
    errors = np.full(config.steps // config.eval_every, np.nan)
    # Others than AWP look at the number of groups alone.
    control = jax.jit(self._controller.init)(self.store.norms(state))
    return Trained(state, control, errors, Log([], []))

  def _step(self, run: Trained, batch: tasks.Batch) -> Trained:
    begin = time.perf_counter()
    state, loss = self.store.step(run.state, batch, self.level(run))
    control = run.control
    if self._case.control and int(state.step) % self._every == 0:
      signal = make_signal(self._case, self.store, state, self.level(run))
      control = self._update(signal, control)
    jax.block_until_ready((state.params, control))
    run.log.step_ms.append(1e3 * (time.perf_counter() - begin))
    run.log.loss.append(float(loss))
    return run._replace(state=state, control=control)

  def _is_checkpoint(self, done: int) -> bool:
    config = self._setup.config
    return done % config.checkpoint_every == 0 or done == config.steps


def run_job(
  setup: Setup,
  *,
  workdir: Workdir | None = None,
  display: Display | None = None,
) -> list[Run]:
  """Runs what a configuration asks for, except what `workdir` already has.

  Args:
    setup: of the job.
    workdir: where to keep checkpoints and finished runs, if anywhere.
    display: what to tell of the progress, if anything.

  Returns:
    One `Run` for each case and seed, seeds in the outer loop.
  """
  config = setup.config
  finished = workdir.read_runs() if workdir else []
  done = {(run.case, run.seed): run for run in finished}
  wanted = [(case, seed) for seed in config.seeds for case in config.cases]
  trainers = {case: Trainer(setup, case) for case in config.cases}
  for case, seed in wanted:
    if (case, seed) not in done:
      on_step = display.begin_run(case, seed) if display else _ignore
      store = workdir.open_store(case, seed) if workdir else None
      trained = trainers[case].train(seed, checkpoints=store, on_step=on_step)
      run = trainers[case].measure(seed, trained)
      done[case, seed] = run
      if store and workdir:
        store.close()
        workdir.add_run(run)
      if display:
        display.end_run(case, seed, 100 - run.error, run.step_ms)
  return [done[key] for key in wanted]
