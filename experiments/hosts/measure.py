"""Cases that take turns on the same hosts."""

import statistics
from collections.abc import Sequence
from typing import Any, NamedTuple

import rich.console
import rich.progress

from experiments.hosts.links import HEADER_BYTES
from experiments.hosts.processes import Group


class Result(NamedTuple):
  """What was measured of one case.

  Attributes:
    case: its name.
    step_ms: median time of a step.
    noise_ms: sample standard deviation of the medians of the rounds.
    interface_bytes: bytes that left a host's interface, each step.
    wire_bytes: the same without the headers of its packets.
    predicted_bytes: what the traced program asks to send; None for a peer.
  """

  case: str
  step_ms: float
  noise_ms: float
  interface_bytes: float
  wire_bytes: float
  predicted_bytes: float | None


def measure(
  groups: Sequence[tuple[Group, Sequence[str]]],
  steps: int,
  rounds: int,
  console: rich.console.Console,
) -> list[Result]:
  """Runs the cases of all groups in turns.

  Args:
    groups: processes, and the cases they run.
    steps: of a case in a round.
    rounds: how often every case gets its turn.
    console: where progress and cases that cannot run are told.

  Raises:
    HostError: a host failed.
  """
  ready: list[tuple[Group, str]] = []
  predicted: dict[str, float | None] = {}
  with rich.progress.Progress(console=console, transient=True) as progress:
    total = sum(len(cases) for _, cases in groups)
    task = progress.add_task("compiling", total=total)
    for group, cases in groups:
      for case in cases:
        progress.update(task, advance=1, description=f"compiling {case}")
        reply = group.ask({"do": "prepare", "case": case})[0]
        if reply["ok"]:
          predicted[case] = reply.get("predicted_bytes")
          ready.append((group, case))
        else:
          console.print(f"{case}: not measured, {reply['reason']}")
    task = progress.add_task("running", total=rounds * len(ready))
    turns: dict[str, list[list[dict[str, Any]]]] = {
      case: [] for _, case in ready
    }
    for _ in range(rounds):
      for group, case in ready:
        progress.update(task, advance=1, description=f"running {case}")
        turns[case].append(
          group.ask({"do": "run", "case": case, "steps": steps})
        )
  return [_summarise(case, turns[case], predicted[case]) for _, case in ready]


def _summarise(
  case: str, turns: list[list[dict[str, Any]]], predicted: float | None
) -> Result:
  medians = [
    statistics.median([ms for reply in turn for ms in reply["step_ms"]])
    for turn in turns
  ]
  replies = [reply for turn in turns for reply in turn]
  sent = statistics.median([reply["bytes"] for reply in replies])
  packets = statistics.median([reply["packets"] for reply in replies])
  return Result(
    case=case,
    step_ms=statistics.median(
      [ms for reply in replies for ms in reply["step_ms"]]
    ),
    noise_ms=statistics.stdev(medians) if len(medians) > 1 else 0.0,
    interface_bytes=sent,
    wire_bytes=sent - HEADER_BYTES * packets,
    predicted_bytes=predicted,
  )
