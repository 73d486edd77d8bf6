"""Worker of one host: trains one case as the parent process asks.

Commands and replies are one JSON object a line, as in `experiments.hosts`:

  {"do": "start", "order": {...}}  -> facts of the case
  {"do": "train", "steps": N}      -> {"seconds": S, "bytes": B, "packets": P,
                                       "finite": true}
  {"do": "evaluate"}               -> {"loss": L}
  {"do": "quit"}                   -> exit code 0

A host evaluates its own part of the held-out text.
"""

import argparse
import json
import math
import queue
import time
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

from experiments.hosts import worker
from experiments.train.decoder import Batch, Decoder, Shape

_SCORED = 4  # Windows that are evaluated at a time.


class Order(NamedTuple):
  """Tells hosts what to train, and over which link."""

  case: str  # One of `cases.CASES`.
  seed: int  # Seed of parameters and batches.
  steps: int  # Number of steps; the schedule ends there.
  rate: float  # Greatest learning rate.


class Trainer(Protocol):
  """One case, compiled and at its initial parameters."""

  facts: dict[str, Any]  # What the parent process should know.

  def step(self, index: int) -> float:
    """Takes a step, counted from 0, and returns the host's own loss."""

  def settle(self) -> None:
    """Waits for all that is under way on all hosts."""

  def evaluate(self) -> float:
    """Returns the mean loss of the host's part of the held-out text."""


class Place(NamedTuple):
  """One host among all, and what it trains."""

  arguments: argparse.Namespace  # Of the command line.
  decoder: Decoder  # Model and data.

  def make_batch(self, seed: int, step: int) -> Batch:
    """Returns the host's part of the batch of a step."""
    rank, hosts = self.arguments.rank, self.arguments.hosts
    return self.decoder.make_batch(seed, step, rank, hosts)

  def held_out(self) -> Batch:
    """Returns the host's part of the held-out windows."""
    return self.decoder.held_out(self.arguments.rank, self.arguments.hosts)


def cut_range(count: int) -> list[tuple[int, int]]:
  """Returns the ranges of windows that are evaluated at a time."""
  return [(i, min(i + _SCORED, count)) for i in range(0, count, _SCORED)]


def serve_parent(
  connect: Callable[[argparse.Namespace], None],
  make_trainer: Callable[[Place, Order], Trainer],
) -> None:
  """Trains as the parent asks, until it says quit; does not return."""
  parser = worker.make_parser(__doc__)
  parser.add_argument("--shape", type=json.loads, required=True)
  arguments = parser.parse_args()
  place = Place(arguments, Decoder(Shape(**arguments.shape)))

  def answer(commands: "queue.Queue[str]", reply: worker.Reply) -> None:
    _answer_commands(place, make_trainer, commands, reply)

  worker.converse_with_parent(lambda: connect(arguments), answer)


def _answer_commands(
  place: Place,
  make_trainer: Callable[[Place, Order], Trainer],
  commands: "queue.Queue[str]",
  reply: worker.Reply,
) -> None:
  trainer: Any = None
  done = 0
  while True:
    match json.loads(commands.get()):
      case {"do": "start", "order": order}:
        trainer = make_trainer(place, Order(**order))
        done = 0
        reply(trainer.facts)
      case {"do": "train", "steps": count}:
        interface = place.arguments.interface
        reply(_time_steps(trainer, done, count, interface))
        done += count
      case {"do": "evaluate"}:
        reply({"loss": trainer.evaluate()})
      case {"do": "quit"}:
        return
      case other:
        raise ValueError(f"a command must say what to do, got {other}")


def _time_steps(
  trainer: Trainer, begin: int, count: int, interface: str
) -> dict[str, Any]:
  """Takes steps; what they have under way at the end is in the time."""

  def run() -> tuple[float, bool]:
    start = time.perf_counter()
    losses = [trainer.step(begin + i) for i in range(count)]
    trainer.settle()
    seconds = time.perf_counter() - start
    return seconds, all(map(math.isfinite, losses))

  trainer.settle()
  (seconds, finite), sent, packets = worker.count_run(interface, run)
  return {
    "seconds": seconds,
    "bytes": sent,
    "packets": packets,
    "finite": finite,
  }
