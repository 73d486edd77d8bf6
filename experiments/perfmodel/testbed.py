"""Testbeds that steps are measured on: emulated devices, hosts with a link."""

import contextlib
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
  """Workers on this machine: emulated devices or network namespaces."""

  workers: int  # Number of workers.
  # Rate of the link between hosts of one device each, such as `100mbit`; None
  # for emulated devices of one process.
  rate: str | None = None

  @property
  def name(self) -> str:
    """The name of the testbed in rows and files."""
    if self.rate is None:
      return f"emulated{self.workers}"
    return f"hosts{self.workers}_{self.rate}"


class Effort(NamedTuple):
  """Sizes and repeats of a measurement."""

  # Elements of the largest array of a calibration; half as many between hosts,
  # where large arrays take long.
  largest: int
  sizes: int  # Number of sizes of each operation.
  rounds: int  # Number of rounds over all steps.
  steps: int  # Runs of each step per round; each size is timed as often.


class Measured(NamedTuple):
  """Measured platform and step times of a testbed."""

  # Platform calibrated there; None if it was not calibrated.
  platform: perfmodel.Platform | None
  seconds: dict[Case, float]  # Lower quartile of a step by case.
  # Half of the spread (10th to 90th percentile) over `seconds`.
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
