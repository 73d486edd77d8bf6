"""Where steps are measured: emulated devices, and hosts with a link."""

import contextlib
import pathlib
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from experiments.hosts import links
from experiments.hosts.processes import HostGroup
from experiments.perfmodel import probes
from experiments.perfmodel.cases import Case, Grid
from jaxmotion import perfmodel

_MODULE = "experiments.perfmodel.worker"


class Testbed(NamedTuple):
  """Workers on this machine.

  Attributes:
    workers: how many.
    rate: of the link between hosts of one device each, such as `100mbit`;
      None for emulated devices of one process.
  """

  workers: int
  rate: str | None = None

  @property
  def name(self) -> str:
    """For rows and files."""
    if self.rate is None:
      return f"emulated{self.workers}"
    return f"hosts{self.workers}_{self.rate}"


class Effort(NamedTuple):
  """How much is measured.

  Attributes:
    largest: values of the largest array of a calibration; half of them
      between hosts, where what is larger takes as much longer.
    sizes: of each operation.
    rounds: turns that every step gets.
    steps: of a turn; as often every size is measured.
  """

  largest: int
  sizes: int
  rounds: int
  steps: int


class Measured(NamedTuple):
  """What was measured on a testbed.

  Attributes:
    platform: calibrated there; None if it was not.
    seconds: of a step of each case, the lower quartile.
    noise: half of the spread (10th to 90th percentile), divided by that.
  """

  platform: perfmodel.Platform | None
  seconds: dict[Case, float]
  noise: dict[Case, float]


@contextlib.contextmanager
def group(testbed: Testbed) -> Iterator[HostGroup]:
  """The processes of a testbed, for as long as the context lasts."""
  emulated = testbed.rate is None
  devices = testbed.workers if emulated else 1
  with contextlib.ExitStack() as stack:
    if testbed.rate is None or testbed.rate == "loopback":
      hosts = links.loopback_hosts(1 if emulated else testbed.workers)
    else:
      hosts = stack.enter_context(
        links.linked_hosts(testbed.workers, testbed.rate)
      )
    arguments = [f"--devices={devices}"]
    yield stack.enter_context(HostGroup(hosts, _MODULE, arguments))


def calibrate(
  testbed: Testbed, processes: HostGroup, codecs: Sequence[str], effort: Effort
) -> None:
  """Compiles codecs, collectives and kernels, which turns then measure."""
  options = {
    "codecs": list(codecs),
    "largest": effort.largest // (1 if testbed.rate is None else 2),
    "sizes": effort.sizes,
  }
  processes.ask({"do": "calibrate", "options": options})


def platform(processes: HostGroup) -> perfmodel.Platform:
  """What the turns so far have measured."""
  reply = processes.ask({"do": "platform"})
  return perfmodel.platform_from_dict(reply[0]["platform"])


def prepare(processes: HostGroup, grid: Grid) -> None:
  """Compiles all cases of a testbed."""
  cases = [list(case) for case in (*grid.known, *grid.held_out)]
  processes.ask({"do": "prepare", "cases": cases})


def turn(processes: HostGroup, steps: int) -> list[list[float]]:
  """Runs all cases; the seconds of each are those of the slowest host."""
  replies = processes.ask({"do": "run", "steps": steps})
  slowest: Any = np.max([reply["seconds"] for reply in replies], axis=0)
  return slowest.tolist()


def summarise(
  grid: Grid,
  turns: Sequence[Sequence[Sequence[float]]],
  platform: perfmodel.Platform | None,
) -> Measured:
  """Seconds and noise of all cases.

  Args:
    grid: the cases.
    turns: what `turn` returned, of every round.
    platform: calibrated on the same testbed.
  """
  seconds, noise = {}, {}
  for i, case in enumerate((*grid.known, *grid.held_out)):
    times = np.array([turn[i] for turn in turns])
    seconds[case], spread = probes.undisturbed(times)
    noise[case] = spread / seconds[case]
  return Measured(platform, seconds, noise)


def kept_platform(folder: str | None, testbed: Testbed) -> pathlib.Path | None:
  """Where the platform of a testbed is kept, if it is."""
  return pathlib.Path(folder, f"{testbed.name}.json") if folder else None
