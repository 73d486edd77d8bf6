"""Training of all cases of a run in turns, step by step."""

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
import optax
from flax import nnx

import jaxmotion
from experiments.hetero import batches, cases
from experiments.hetero.slow import make_loss, take_turns, weigh_microbatch
from experiments.train import mesh, optimizer, tasks, trainer
from jaxmotion import hetero

# Numbers of microbatches at which a worker's speed is measured.
_PROBED = (2, 7, 14)
_PROBES = 5
_ATTEMPTS = 20


class Run(NamedTuple):
  """Accuracy, shares and times of one case in one run.

  Attributes:
    scenario: name of the slowdowns.
    deal: name of the way the data were dealt.
    case: name of the case.
    seed: seed of the run.
    score: test accuracy in per cent.
    loss: mean loss over all training images at the end.
    counts: int[steps, workers], microbatches of each worker.
    seconds: float[steps, workers], time of each worker's own work.
    update_s: float[steps], time of exchange and optimizer.
    moves: number of changes of the shares.
  """

  scenario: str
  deal: str
  case: str
  seed: int
  score: float
  loss: float
  counts: np.ndarray
  seconds: np.ndarray
  update_s: np.ndarray
  moves: int


class Bench:
  """Task, data and compiled programs that all runs share.

  Args:
    settings: settings of the experiment.
  """

  def __init__(self, settings: cases.Settings):
    self.settings = settings
    config = settings.make_config()
    self.mesh = mesh.make_mesh(cases.WORKERS)
    self.task = tasks.load_task(config)
    tx = optax.chain(
      jaxmotion.exchange("data"), optimizer.make_optimizer(config)
    )
    self.slow_loss = make_loss(self.task)
    self.init, self.step = jaxmotion.make_train_step(
      self.slow_loss,
      tx,
      self.mesh,
      weight_fn=weigh_microbatch,
      microbatches=settings.total,
    )
    self.score = trainer.make_score(self.task)
    self.dealers = {
      deal: batches.Dealer(
        deal, microbatch=settings.microbatch, total=settings.total
      )
      for deal in settings.deals
    }
    graph = nnx.graphdef(self.task.build(0))
    self.mean_loss = jax.jit(
      lambda p, b: self.task.loss(nnx.merge(graph, p), b)
    )

  def init_params(self, seed: int) -> Any:
    """Returns the model's parameters before training."""
    return nnx.to_pure_dict(nnx.state(self.task.build(seed), nnx.Param))

  def measure_speeds(
    self, dealer: batches.Dealer, slow: Sequence[int]
  ) -> tuple[list[float], float]:
    """Returns each worker's microbatches per second, and the fixed seconds."""
    state = self.init(self.init_params(0))
    batch = dealer.deal_batch(self._equal_counts(), slow, 0, 0)

    def measure_turns() -> np.ndarray:
      """Returns seconds[probe, worker] of one turn with each count."""
      turns = [
        take_turns(self.step.compute, state, batch, (n,) * cases.WORKERS)[1]
        for n in _PROBED
      ]
      return np.array(turns)

    measure_turns()  # Compiles.
    seconds = measure_turns()
    for attempt in range(1, _ATTEMPTS + 1):
      # The fastest repeat: disturbances only make a measurement longer.
      for _ in range(_PROBES):
        seconds = np.minimum(seconds, measure_turns())
      try:
        fits = [hetero.fit_speed(_PROBED, times) for times in seconds.T]
        break
      except ValueError:
        # On a busy machine, no repeat of a short turn may be undisturbed.
        if attempt == _ATTEMPTS:
          raise
    speeds, fixed = zip(*fits, strict=True)
    return list(speeds), statistics.median(fixed)

  def _equal_counts(self) -> tuple[int, ...]:
    return hetero.integer_shares(self.settings.total, (1.0,) * cases.WORKERS)


class _Trainee:
  """Training state, shares and times of one case."""

  def __init__(self, bench: Bench, name: str, speeds: Any, fixed_s: float):
    self.case = cases.CASES[name]
    self.balance = hetero.rebalance(
      total=bench.settings.total, workers=cases.WORKERS, fixed_s=fixed_s
    )
    known = speeds if self.case.split == "measured" else None
    self.shares = self.balance.init(known)
    self.state: Any = None
    self.counts: list[tuple[int, ...]] = []
    self.seconds: list[np.ndarray] = []
    self.update_s: list[float] = []

  def step(
    self,
    bench: Bench,
    dealer: batches.Dealer,
    slow: Sequence[int],
    seed: int,
    step: int,
  ) -> float:
    """Trains one step and returns the loss."""
    counts = self.shares.counts
    batch = dealer.deal_batch(
      counts, slow, seed, step, weighted=self.case.weighted
    )
    work, seconds = take_turns(bench.step.compute, self.state, batch, counts)
    begin = time.perf_counter()
    self.state, loss = jax.block_until_ready(
      bench.step.update(self.state, work)
    )
    self.update_s.append(time.perf_counter() - begin)
    self.counts.append(counts)
    self.seconds.append(seconds)
    if self.case.split == "rebalanced":
      self.shares = self.balance.update(seconds.tolist(), self.shares)
    return float(loss)


def train_cases(
  bench: Bench,
  scenario: str,
  deal: str,
  seed: int,
  on_step: Callable[[int, float], None],
) -> list[Run]:
  """Trains all cases in turns, so that a slow minute falls on all alike."""
  steps, dealer = bench.settings.steps, bench.dealers[deal]
  speeds, fixed_s = bench.measure_speeds(
    dealer, cases.find_slowdowns(scenario, 0, steps)
  )
  trainees = {
    name: _Trainee(bench, name, speeds, fixed_s) for name in cases.CASES
  }
  for trainee in trainees.values():
    trainee.state = bench.init(bench.init_params(seed))
  for step in range(steps):
    slow = cases.find_slowdowns(scenario, step, steps)
    for trainee in trainees.values():
      loss = trainee.step(bench, dealer, slow, seed, step)
    on_step(step + 1, loss)
  return [
    Run(
      scenario,
      deal,
      name,
      seed,
      bench.score(t.state.params),
      float(bench.mean_loss(_take_local(t.state.params), dealer.images)),
      np.array(t.counts),
      np.array(t.seconds),
      np.array(t.update_s),
      t.shares.changes,
    )
    for name, t in trainees.items()
  ]


def _take_local(params: Any) -> Any:
  """Returns the first worker's copy of replicated parameters."""
  return jax.tree.map(lambda a: a.addressable_data(0), params)
