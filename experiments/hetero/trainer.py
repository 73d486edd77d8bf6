"""Training of all cases in turns, on workers that extra work slows."""

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax import lax

import jaxmotion
from experiments.data.images import batch_indices, load_digits
from experiments.hetero import cases
from experiments.hetero.cases import Settings
from experiments.train import mesh, optimizer, tasks, trainer
from experiments.train.tasks import Task
from jaxmotion import hetero

Batch = tasks.Batch


class Dealer:
  """Deals the training images to workers, as a function of seed and step."""

  def __init__(self, deal: str, *, microbatch: int, total: int):
    # "shuffled" deals every batch at random, each epoch a permutation.
    # "by_class" sorts the images by label. Each worker draws from its own
    # range, as long as its share of the work: all images are equally likely,
    # but workers see different classes.
    self._is_shuffled = deal == "shuffled"
    self._microbatch, self._total = microbatch, total
    data = load_digits()
    count = len(data.train.labels)
    whole, _ = tasks.image_batches(data, count)
    batch = whole(0, 0)
    order = np.argsort(batch["labels"], kind="stable")
    self.images: Batch = {k: a[order] for k, a in batch.items()}

  def deal_batch(
    self,
    counts: Sequence[int],
    slow: Sequence[int],
    seed: int,
    step: int,
    *,
    weighted: bool = True,
  ) -> Batch:
    """Returns a batch for workers with room for `total` microbatches."""
    index = self._choose_images(np.asarray(counts), seed, step)
    examples = {k: a[index] for k, a in self.images.items()}
    batch, valid = hetero.assign_microbatches(
      examples,
      counts,
      microbatch=self._microbatch,
      max_microbatches=self._total,
    )
    own = len(valid) // len(counts)
    share = np.maximum(counts, 1)
    weight = np.full(len(counts), self._microbatch) if weighted else 1 / share
    return batch | {
      "weight": np.repeat(weight.astype(np.float32), own),
      "repeats": np.repeat(np.asarray(slow, np.int32), own),
    }

  def _choose_images(
    self, counts: np.ndarray, seed: int, step: int
  ) -> np.ndarray:
    """Returns indices of the images of a step, worker after worker."""
    size, images = self._total * self._microbatch, len(self.images["labels"])
    if self._is_shuffled:
      return batch_indices(images, size, seed, step)
    ends = np.rint(np.cumsum(counts) / self._total * images).astype(int)
    random = np.random.default_rng([seed, step])
    drawn = [
      begin + random.choice(end - begin, n * self._microbatch, replace=False)
      for begin, end, n in zip([0, *ends], ends, counts, strict=False)
    ]
    return np.concatenate(drawn)


Params = Any


def make_loss(task: Task) -> Callable[[Params, tasks.Batch], jax.Array]:
  """Returns the mean loss of a microbatch, computed several times."""
  # A microbatch with `repeats` of r is computed r times, forward and backward.
  # Only the last time counts.
  graph = nnx.graphdef(task.build(0))

  def mean_loss(params: Params, batch: tasks.Batch) -> jax.Array:
    return task.loss(nnx.merge(graph, params), batch)

  def slow_loss(params: Params, batch: tasks.Batch) -> jax.Array:
    frozen = lax.stop_gradient(params)

    def repeat_work(_: Any, pixels: jax.Array) -> jax.Array:
      grads = jax.grad(mean_loss)(frozen, batch | {"pixels": pixels})
      # Adds zero, but XLA cannot know that: each repeat needs the last one.
      return pixels + 0.0 * sum(jnp.sum(g) for g in jax.tree.leaves(grads))

    repeats = batch["repeats"][0]
    pixels = lax.fori_loop(1, repeats, repeat_work, batch["pixels"])
    return mean_loss(params, batch | {"pixels": pixels})

  return slow_loss


def weigh_microbatch(batch: tasks.Batch) -> jax.Array:
  """Returns the weight of a microbatch, which all its examples share."""
  return batch["weight"][0]


@jax.jit
def _add_trees(a: Any, b: Any) -> Any:
  return jax.tree.map(jnp.add, a, b)


def take_turns(
  compute: Callable[..., Any],
  state: jaxmotion.TrainState,
  batch: tasks.Batch,
  counts: Sequence[int],
) -> tuple[Any, np.ndarray]:
  """Does a step's work one worker after another, and times each worker."""
  # The same compiled program runs once for each worker, with no work for the
  # others. Emulated workers share the machine's cores: if they ran together,
  # each would take longer than alone.
  # Returns the work, as `compute` returns it, and the seconds of each
  # worker.
  parts, seconds = [], np.zeros(len(counts))
  for worker in range(len(counts)):
    alone = np.where(np.arange(len(counts)) == worker, counts, 0)
    begin = time.perf_counter()
    work = compute(state, batch, counts=alone)
    parts.append(jax.block_until_ready(work))
    seconds[worker] = time.perf_counter() - begin
  work = parts[0]
  for part in parts[1:]:
    work = _add_trees(work, part)
  return work, seconds


# Numbers of microbatches at which a worker's speed is measured.
_PROBED = (2, 7, 14)
_PROBES = 5
_ATTEMPTS = 20


class Run(NamedTuple):
  """Accuracy, shares and times of one case in one run."""

  scenario: str  # Name of the slowdowns.
  deal: str  # Name of the way the data were dealt.
  case: str  # Name of the case.
  seed: int  # Seed of the run.
  score: float  # Test accuracy in per cent.
  loss: float  # Mean loss over all training images at the end.
  counts: np.ndarray  # int[steps, workers], microbatches of each worker.
  seconds: np.ndarray  # float[steps, workers], time of each worker's own work.
  update_s: np.ndarray  # float[steps], time of exchange and optimizer.
  moves: int  # Number of changes of the shares.


class Bench:
  """Task, data and compiled programs that all runs share."""

  def __init__(self, settings: Settings):
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
      deal: Dealer(deal, microbatch=settings.microbatch, total=settings.total)
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
    self, dealer: Dealer, slow: Sequence[int]
  ) -> tuple[list[float], float]:
    """Returns each worker's microbatches per second, and the fixed seconds."""
    state = self.init(self.init_params(0))
    equal = hetero.integer_shares(self.settings.total, (1.0,) * cases.WORKERS)
    batch = dealer.deal_batch(equal, slow, 0, 0)

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
    dealer: Dealer,
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
