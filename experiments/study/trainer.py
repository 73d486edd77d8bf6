"""Training runs of the study, and the bytes and times of their links."""

import functools
import math
import statistics
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from flax import nnx
from ml_collections import ConfigDict

from experiments.common import loop
from experiments.common.loop import OnStep
from experiments.study import cases
from experiments.train import trainer
from experiments.train.mesh import Mesh
from experiments.train.tasks import Task
from jaxmotion import perfmodel, wire

LINKS = {
  "10mbit": perfmodel.Link(latency_s=0.05, rate=perfmodel.gbit_per_s(0.01)),
  "100mbit": perfmodel.Link(latency_s=0.01, rate=perfmodel.gbit_per_s(0.1)),
  "1gbit": perfmodel.Link(latency_s=0.0002, rate=perfmodel.gbit_per_s(1)),
}
"""Links that times are predicted for; the latency is that of a message."""

_SUM = "all_reduce"


class Trial(NamedTuple):
  """Names one run among all others."""

  algorithm: str  # Name of the algorithm.
  seed: int  # Seed of the initial parameters and of the batches.
  steps: int  # Number of steps.
  rate: float  # Greatest learning rate.
  # Outer learning rate of local updates, None for others.
  outer_rate: float | None


class StudyRun(NamedTuple):
  """Holds the measurements of one finished run."""

  trial: Trial  # What has run.
  score: float | None  # Score on the held-out data, None if it is not finite.
  # Mean training loss of the last tenth of the steps, None if it is not finite.
  loss: float | None
  # Bytes that one worker sends in a step, mean over the run, by the compiled
  # program.
  wire_bytes: float
  # Predicted time of each link of `LINKS` in a step, mean over the run.
  link_ms: list[float]
  step_ms: float  # Time of a step on emulated devices, by `typical_ms`.

  def to_line(self) -> dict[str, Any]:
    """Returns the fields of the trial and of the run side by side."""
    fields = self._asdict()
    return fields.pop("trial")._asdict() | fields


def run_from_line(**line: Any) -> StudyRun:
  """Returns the run that `StudyRun.to_line` wrote."""
  trial = Trial(**{name: line.pop(name) for name in Trial._fields})
  return StudyRun(trial, **line)


class Sent(NamedTuple):
  """Holds what one step of a branch sends."""

  wire_bytes: float  # Bytes that one worker sends, by the compiled program.
  link_ms: list[float]  # Predicted time of each link of `LINKS`.


class Bench:
  """Trains all algorithms on one task; each is compiled once for all rates."""

  def __init__(self, config: ConfigDict, task: Task, mesh: Mesh):
    self._config = config
    self._task = task
    self._mesh = mesh
    self._score = trainer.make_score(task)
    self._graph = nnx.graphdef(task.build(0))
    # Programs are large: those of the algorithm at work are kept.
    self._compile = functools.lru_cache(maxsize=1)(self._compile_step)

  def run(self, trial: Trial, on_step: OnStep = loop.ignore_step) -> StudyRun:
    """Returns the measurements of a run."""
    algorithm = cases.ALGORITHMS[trial.algorithm]
    length = trial.steps if algorithm.warms_up else 0
    init, step, sent = self._compile(trial.algorithm, trial.outer_rate, length)
    state = cases.set_rates(init(trial.seed), trial.rate, trial.steps)

    def take_step(state: Any, batch: Any) -> tuple[Any, float]:
      state, loss = step(state, batch)
      return state, float(np.mean(loss))

    state, log = loop.run_steps(
      state,
      take_step,
      lambda index: self._task.batch(trial.seed, index),
      steps=trial.steps,
      checkpoint_every=trial.steps,
      on_step=on_step,
    )
    phases = [
      (sent(b), n / trial.steps) for b, n in algorithm.phases(trial.steps)
    ]
    last = log.loss[-max(1, trial.steps // 10) :]
    return StudyRun(
      trial,
      score=_finite(self._score(state.params)),
      loss=_finite(statistics.fmean(last)),
      wire_bytes=math.fsum(share * s.wire_bytes for s, share in phases),
      link_ms=[
        math.fsum(share * s.link_ms[i] for s, share in phases)
        for i in range(len(LINKS))
      ],
      step_ms=typical_ms(log.step_ms),
    )

  def _compile_step(
    self, name: str, outer_rate: float | None, length: int
  ) -> tuple[Any, Any, Any]:
    """Returns seed -> state, the compiled step, and branch -> `Sent`."""

    def loss(params: Any, batch: Any) -> jax.Array:
      return self._task.loss(nnx.merge(self._graph, params), batch)

    step: Any
    init_params, step = cases.make_step(
      self._config, loss, self._mesh, name, outer_rate, length
    )

    def init(seed: int) -> Any:
      params = nnx.state(self._task.build(seed), nnx.Param)
      return init_params(nnx.to_pure_dict(params))

    compiled = step.lower(init(0), self._task.batch(0, 0)).compile()

    apart = cases.ALGORITHMS[name].rounds, cases.ALGORITHMS[name].fragments

    @functools.cache
    def count_sent(branch: int | None) -> Sent:
      ledger = wire.compiled_bytes(compiled, branch=branch)
      link_ms = [1e3 * link_seconds(ledger, LINKS[k], *apart) for k in LINKS]
      return Sent(ledger.total_bytes, link_ms)

    return init, compiled, count_sent


def typical_ms(step_ms: Sequence[float]) -> float:
  """Returns the mean time of a step that no other program lengthens much."""
  # Local updates exchange in one step of `EVERY`. So each of that many steps
  # has a tenth percentile of its own, over the run.
  turns = [
    step_ms[i :: cases.EVERY] for i in range(min(cases.EVERY, len(step_ms)))
  ]
  return statistics.fmean(float(np.percentile(turn, 10)) for turn in turns)


def link_seconds(
  ledger: wire.Ledger, link: perfmodel.Link, rounds: int = 1, fragments: int = 1
) -> float:
  """Predicts the time that the collectives of a step take on a link."""
  # Those of one kind and dtype travel together, as compilers for GPUs and TPUs
  # combine them. The CPU's compiler leaves them apart.
  together: dict[tuple[str, str, int], float] = {}
  for move in ledger.moves:
    key = (move.op, move.dtype, move.workers)
    together[key] = together.get(key, 0.0) + move.count * move.payload_bytes
  return math.fsum(
    _collective_seconds(
      op, payload, workers, link, fragments * (rounds if op == _SUM else 1)
    )
    for (op, _, workers), payload in together.items()
  )


def _collective_seconds(
  op: str, payload: float, workers: int, link: perfmodel.Link, times: int
) -> float:
  is_power = workers & (workers - 1) == 0 and op != "all_to_all"
  algorithm = "halving_doubling" if is_power else "ring"
  return times * perfmodel.collective_seconds(
    op, payload / times, workers, link, algorithm=algorithm
  )


def _finite(value: float) -> float | None:
  return value if math.isfinite(value) else None
