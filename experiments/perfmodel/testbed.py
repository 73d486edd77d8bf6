"""Testbeds that steps are measured on: emulated devices, hosts with a link."""

import contextlib
import pathlib
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from experiments.hosts import links
from experiments.hosts.processes import HostGroup
from experiments.perfmodel.cases import Case, Grid
from jaxmotion import perfmodel
from jaxmotion.calibration.extend import robust_seconds

_MODULE = "experiments.perfmodel.worker"


class Testbed(NamedTuple):
  """Workers on this machine: emulated devices or network namespaces.

  Attributes:
    workers: number of workers.
    rate: rate of the link between hosts of one device each, such as `100mbit`;
      None for emulated devices of one process.
  """

  workers: int
  rate: str | None = None

  @property
  def name(self) -> str:
    """The name of the testbed in rows and files."""
    if self.rate is None:
      return f"emulated{self.workers}"
    return f"hosts{self.workers}_{self.rate}"


class Effort(NamedTuple):
  """Sizes and repeats of a measurement.

  Attributes:
    largest: elements of the largest array of a calibration; half as many
      between hosts, where large arrays take long.
    sizes: number of sizes of each operation.
    rounds: number of rounds over all steps.
    steps: runs of each step per round; each size is timed as often.
  """

  largest: int
  sizes: int
  rounds: int
  steps: int


class Measured(NamedTuple):
  """Measured platform and step times of a testbed.

  Attributes:
    platform: platform calibrated there; None if it was not calibrated.
    seconds: lower quartile of a step by case.
    noise: half of the spread (10th to 90th percentile) over `seconds`.
  """

  platform: perfmodel.Platform | None
  seconds: dict[Case, float]
  noise: dict[Case, float]


@contextlib.contextmanager
def start_processes(testbed: Testbed) -> Iterator[HostGroup]:
  """Starts the processes of a testbed and ends them with the context."""
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


def start_calibration(
  testbed: Testbed, processes: HostGroup, codecs: Sequence[str], effort: Effort
) -> None:
  """Compiles codecs, collectives and kernels, which rounds then time."""
  options = {
    "codecs": list(codecs),
    "largest": effort.largest // (1 if testbed.rate is None else 2),
    "sizes": effort.sizes,
  }
  processes.ask({"do": "calibrate", "options": options})


def fetch_platform(processes: HostGroup) -> perfmodel.Platform:
  """Returns the platform of all rounds so far."""
  reply = processes.ask({"do": "platform"})
  return perfmodel.platform_from_dict(reply[0]["platform"])


def compile_cases(processes: HostGroup, grid: Grid) -> None:
  """Compiles the steps of all cases in the processes of a testbed."""
  cases = [list(case) for case in (*grid.known, *grid.held_out)]
  processes.ask({"do": "prepare", "cases": cases})


def run_round(processes: HostGroup, steps: int) -> list[list[float]]:
  """Runs all cases; returns the seconds of the slowest host for each."""
  replies = processes.ask({"do": "run", "steps": steps})
  slowest: Any = np.max([reply["seconds"] for reply in replies], axis=0)
  return slowest.tolist()


def summarize_rounds(
  grid: Grid,
  rounds: Sequence[Sequence[Sequence[float]]],
  platform: perfmodel.Platform | None,
) -> Measured:
  """Returns seconds and noise of all cases."""
  seconds, noise = {}, {}
  for i, case in enumerate((*grid.known, *grid.held_out)):
    times = np.array([seconds_by_case[i] for seconds_by_case in rounds])
    seconds[case], spread = robust_seconds(times)
    noise[case] = spread / seconds[case]
  return Measured(platform, seconds, noise)


def platform_path(folder: str | None, testbed: Testbed) -> pathlib.Path | None:
  """Returns the file of a testbed's platform; None without a folder."""
  return pathlib.Path(folder, f"{testbed.name}.json") if folder else None
