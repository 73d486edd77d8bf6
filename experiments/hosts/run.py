"""Timing of cases that take turns on the same hosts."""

import contextlib
import importlib.util
import statistics
from collections.abc import Sequence
from typing import Any, NamedTuple

import rich.console
import rich.progress

from experiments.hosts import links
from experiments.hosts.cases import EXCHANGE_WORKER, PEER_WORKER
from experiments.hosts.processes import HostGroup


class Setting(NamedTuple):
  """Hosts, link and model of one measurement."""

  hosts: int = 2  # Number of hosts.
  # Rate of the link, such as `1gbit`; `none` does not limit it, `loopback` has
  # no link.
  rate: str = "100mbit"
  rtt_ms: float = 0.0  # Round trip added between two hosts, milliseconds.
  # Widths of the MLP's layers.
  widths: Sequence[int] = (784, 2048, 2048, 2048, 10)
  batch: int = 32  # Number of examples on each host.
  steps: int = 5  # Number of steps of a case in a round.
  rounds: int = 5  # Number of turns of every case.
  optimizer: str = "sgd"  # One of `worker.OPTIMIZERS`.

  @property
  def experiment(self) -> str:
    """Name of the measurement in the rows."""
    name = f"hosts_{self.hosts}_{self.rate}"
    name += f"_rtt{self.rtt_ms:g}ms" if self.rtt_ms else ""
    return name + (f"_{self.optimizer}" if self.optimizer != "sgd" else "")


class Result(NamedTuple):
  """Step time and bytes of one case."""

  case: str  # Name of the case.
  step_ms: float  # Median time of a step, milliseconds.
  noise_ms: float  # Sample standard deviation of the medians of the rounds.
  process_ms: float  # CPU time of a host's process in a step, all threads.
  interface_bytes: float  # Bytes that left a host's interface, each step.
  wire_bytes: float  # The same without the headers of the packets.
  # Bytes that the traced program sends; None for a peer.
  predicted_bytes: float | None


def measure_cases(
  setting: Setting,
  exchanges: Sequence[str],
  peers: Sequence[str],
  console: rich.console.Console,
) -> list[Result]:
  """Starts the hosts and times the cases on them in turns."""
  arguments = [
    f"--widths={','.join(map(str, setting.widths))}",
    f"--batch={setting.batch}",
    f"--optimizer={setting.optimizer}",
  ]
  chosen = [(EXCHANGE_WORKER, exchanges), (PEER_WORKER, peers)]
  if peers and importlib.util.find_spec("torch") is None:
    console.print("PyTorch is not installed (extra `peers`): not measured.")
    chosen.pop()
  with contextlib.ExitStack() as stack:
    if setting.rate == "loopback":
      hosts = links.loopback_hosts(setting.hosts)
    else:
      half_ms = setting.rtt_ms / 2
      linked = links.linked_hosts(setting.hosts, setting.rate, half_ms)
      hosts = stack.enter_context(linked)
    groups = [
      (stack.enter_context(HostGroup(hosts, module, arguments)), cases)
      for module, cases in chosen
      if cases
    ]
    return _take_turns(groups, setting.steps, setting.rounds, console)


def _take_turns(
  groups: Sequence[tuple[HostGroup, Sequence[str]]],
  steps: int,
  rounds: int,
  console: rich.console.Console,
) -> list[Result]:
  """Times the cases of all groups, each once in every round."""
  ready: list[tuple[HostGroup, str]] = []
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
  return [
    _summarize_case(case, turns[case], predicted[case]) for _, case in ready
  ]


def _summarize_case(
  case: str, turns: list[list[dict[str, Any]]], predicted: float | None
) -> Result:
  """Returns medians of one case over its turns and hosts."""
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
    process_ms=statistics.median([reply["process_ms"] for reply in replies]),
    interface_bytes=sent,
    wire_bytes=sent - links.HEADER_BYTES * packets,
    predicted_bytes=predicted,
  )
