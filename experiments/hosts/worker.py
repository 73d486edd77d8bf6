"""Worker of one host: runs the commands of the parent process.

Commands and replies are one JSON object a line. All hosts get the same commands
in the same order:

  {"do": "prepare", "case": NAME}         -> {"case": NAME, "ok": true, ...}
  {"do": "run", "case": NAME, "steps": N} -> {"case": NAME, "step_ms": [...],
                                              "process_ms": T, "bytes": B,
                                              "packets": P}
  {"do": "quit"}                          -> exit code 0

The worker first sends `{"ready": true}`, once the hosts are connected. The
reply to a case that cannot run is `{"case": NAME, "ok": false, "reason": ...}`.
A worker that fails sends `{"error": ...}` and exits with code 1. The end of its
input ends a worker, even in the middle of a step.
"""

import argparse
import json
import os
import queue
import sys
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

from experiments.hosts import links

T = TypeVar("T")
Reply = Callable[[dict[str, Any]], None]

# Seconds until the interface has counted the bytes in the sockets' buffers.
_DRAIN_S = 0.1

OPTIMIZERS = {"sgd": 0.01, "adamw": 0.001}
"""Learning rate by name of the optimizer."""


class Unsupported(Exception):
  """Error of a case that cannot run here; its message says why."""


class Backend(Protocol):
  """Framework that trains on several hosts."""

  warm_up: int  # Number of steps of a case before it is measured.

  def connect(self) -> None:
    """Connects to the other hosts."""

  def prepare(self, case: str) -> tuple[Callable[[], float], dict[str, Any]]:
    """Returns the step of a case (it waits and returns the loss), and facts."""

  def barrier(self) -> None:
    """Waits until all hosts call it."""


def make_parser(about: str | None) -> argparse.ArgumentParser:
  """Returns a parser of what `HostGroup` tells every worker."""
  parser = argparse.ArgumentParser(description=about)
  parser.add_argument("--coordinator", required=True, help="IP:PORT of rank 0")
  parser.add_argument("--rank", type=int, required=True)
  parser.add_argument("--hosts", type=int, required=True)
  parser.add_argument("--interface", required=True, help="whose bytes count")
  return parser


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
  """Parses the command line of a worker."""
  parser = make_parser(__doc__)
  parser.add_argument(
    "--widths",
    type=lambda text: [int(width) for width in text.split(",")],
    required=True,
    help="of the layers of the model, the input's first",
  )
  parser.add_argument("--batch", type=int, required=True, help="rows a host")
  parser.add_argument("--optimizer", choices=OPTIMIZERS, default="sgd")
  return parser.parse_args(argv)


def serve_parent(backend: Backend, interface: str) -> None:
  """Runs the parent's commands until it says quit; does not return."""

  def answer_all(commands: "queue.Queue[str]", reply: Reply) -> None:
    _answer_commands(backend, interface, commands, reply)

  converse_with_parent(backend.connect, answer_all)


def converse_with_parent(
  connect: Callable[[], None],
  answer: "Callable[[queue.Queue[str], Reply], None]",
) -> None:
  """Connects the hosts, then answers the parent process; does not return."""
  # Only replies go to standard output: the output of libraries goes to stderr.
  replies = os.fdopen(os.dup(1), "w")
  os.dup2(2, 1)

  def reply(message: dict[str, Any]) -> None:
    print(json.dumps(message), file=replies, flush=True)

  code = 1
  try:
    commands = _read_commands()
    connect()
    reply({"ready": True})
    answer(commands, reply)
    code = 0
  except BaseException as error:
    traceback.print_exc()
    said = " ".join(str(error).split())
    reply({"error": f"{type(error).__name__}: {said}"})
  finally:
    # An ordinary exit waits for other hosts, which may be dead.
    os._exit(code)


def _read_commands() -> "queue.Queue[str]":
  """Reads commands in a thread, so that the end of input ends a stuck step."""
  commands: queue.Queue[str] = queue.Queue()

  def read_lines() -> None:
    for line in sys.stdin:
      commands.put(line)
      if json.loads(line).get("do") == "quit":
        return
    os._exit(1)

  threading.Thread(target=read_lines, daemon=True).start()
  return commands


def _answer_commands(
  backend: Backend, interface: str, commands: "queue.Queue[str]", reply: Reply
) -> None:
  """Prepares and times cases as the parent asks, until it says quit."""
  steps: dict[str, Callable[[], float]] = {}
  periods: dict[str, int] = {}
  while True:
    match json.loads(commands.get()):
      case {"do": "prepare", "case": case}:
        try:
          steps[case], facts = backend.prepare(case)
        except Unsupported as why:
          reply({"case": case, "ok": False, "reason": str(why)})
          continue
        periods[case] = facts.get("period", 1)
        for _ in range(max(backend.warm_up, periods[case])):
          steps[case]()
        reply({"case": case, "ok": True, **facts})
      case {"do": "run", "case": case, "steps": count}:
        backend.barrier()
        timed = _time_steps(steps[case], count, periods[case], interface)
        reply({"case": case, **timed})
      case {"do": "quit"}:
        return
      case other:
        raise ValueError(f"a command must say what to do, got {other}")


def _time_steps(
  step: Callable[[], float], count: int, period: int, interface: str
) -> dict[str, Any]:
  """Times steps, of which those of one period are timed together."""
  periods = -(-count // period)
  step_ms: list[float] = []

  def run() -> tuple[float, float]:
    loss, processed = 0.0, time.process_time()
    for _ in range(periods):
      begin = time.perf_counter()
      for _ in range(period):
        loss = step()
      step_ms.append(1e3 * (time.perf_counter() - begin) / period)
    return loss, time.process_time() - processed

  (loss, processed_s), sent, packets = count_run(interface, run)
  steps = periods * period
  return {
    "step_ms": step_ms,
    "process_ms": 1e3 * processed_s / steps,
    "loss": loss,
    "bytes": sent / steps,
    "packets": packets / steps,
  }


def count_run(interface: str, run: Callable[[], T]) -> tuple[T, int, int]:
  """Runs a function; returns its result, and bytes and packets sent."""
  time.sleep(_DRAIN_S)
  before = links.count_sent(interface)
  result = run()
  time.sleep(_DRAIN_S)
  sent, packets = links.count_sent(interface)
  return result, sent - before[0], packets - before[1]
