"""Compares predicted steps with measured ones that no calibration has seen.

  python -m experiments.perfmodel.validate --json=perfmodel_validate.jsonl

On each testbed codecs, collectives and kernels are measured by themselves, and
steps without exchange at a few batches and widths. All steps with an exchange,
and steps without at other batches and widths, are then predicted and measured.
A number of emulated devices in `--between` is not calibrated at all: it is
predicted from its neighbours.

Emulated devices share the cores of this machine; hosts are network namespaces
of it (see `experiments.hosts`), with a limited link. On a testbed all that
is measured takes turns.
"""

import pathlib
import signal
import sys
from collections.abc import Mapping

import rich.console
import rich.progress
from absl import app, flags

from experiments.common import records, shared_flags
from experiments.common.console import make_console
from experiments.hosts import links
from experiments.hosts.processes import HostError
from experiments.perfmodel import (
  cases,
  predict,
  report,
  testbed as perfmodel_testbed,
)
from experiments.perfmodel.cases import Grid
from experiments.perfmodel.score import Pair, decisions
from experiments.perfmodel.testbed import Effort, Measured, Testbed
from experiments.train.cases import EXCHANGES
from jaxmotion import perfmodel

_EMULATED = flags.DEFINE_list("emulated", ["2", "4"], "Emulated devices.")
_BETWEEN = flags.DEFINE_list(
  "between", ["3"], "Emulated devices that are not calibrated."
)
_RATES = flags.DEFINE_list(
  "rates", ["100mbit", "1gbit"], "Of the link between two hosts; or loopback."
)
_EXCHANGES = flags.DEFINE_list(
  "exchanges", ["none", *EXCHANGES], "Exchanges to predict."
)
_KNOWN_WIDTHS = flags.DEFINE_list(
  "known_widths", ["512", "1280"], "Of the MLPs that calibrate."
)
_KNOWN_BATCHES = flags.DEFINE_list(
  "known_batches", ["8", "32", "128"], "Of a worker, in the calibration."
)
_SHAPES = flags.DEFINE_list(
  "shapes",
  ["512x64", "768x64", "1280x16"],
  "Width x batch of the held-out steps.",
)
_ROUNDS = flags.DEFINE_integer(
  "rounds", 9, "Turns of every step.", 1, allow_override=True
)
_STEPS = flags.DEFINE_integer("steps", 2, "Of a turn.", 1, allow_override=True)
_SIZES = flags.DEFINE_integer(
  "sizes", 6, "Sizes of an operation.", 2, allow_override=True
)
_LARGEST = flags.DEFINE_integer(
  "largest",
  1 << 22,
  "Values of the largest array.",
  1 << 12,
  allow_override=True,
)
_PLATFORMS = flags.DEFINE_string(
  "platforms", None, "Folder of calibrated platforms: read, or else written."
)
_JSON = shared_flags.define_rows()
_PLOT = shared_flags.define_plot()


def measure(
  testbed: Testbed,
  calibrated: bool,
  grid: Grid,
  effort: Effort,
  console: rich.console.Console,
) -> Measured:
  """Calibrates a testbed, and runs all cases on it in turns.

  Args:
    testbed: where.
    calibrated: whether it has a platform.
    grid: the cases.
    effort: of the measurement.
    console: where progress is told.

  Raises:
    HostError: a process failed.
  """
  codecs = {case.exchange for case in grid.held_out} - {"none", "fp32"}
  path = perfmodel_testbed.kept_platform(_PLATFORMS.value, testbed)
  kept = path and path.exists()
  platform, turns = None, []
  with (
    perfmodel_testbed.group(testbed) as processes,
    rich.progress.Progress(console=console, transient=True) as progress,
  ):
    task = progress.add_task(f"{testbed.name}: compiling", total=None)
    perfmodel_testbed.prepare(processes, grid)
    if calibrated and not kept:
      perfmodel_testbed.calibrate(testbed, processes, sorted(codecs), effort)
    progress.update(
      task, description=f"{testbed.name}: running", total=effort.rounds
    )
    for _ in range(effort.rounds):
      turns.append(perfmodel_testbed.turn(processes, effort.steps))
      progress.advance(task)
    if path and kept:
      platform = perfmodel.load_platform(path)
    elif calibrated:
      platform = perfmodel_testbed.platform(processes)
      if path:
        path.parent.mkdir(parents=True, exist_ok=True)
        perfmodel.save_platform(platform, path)
  return perfmodel_testbed.summarise(grid, turns, platform)


def compare(grid: Grid, found: Mapping[Testbed, Measured]) -> list[Pair]:
  """Predicts the held-out cases of all testbeds.

  Args:
    grid: the cases.
    found: what was measured; a testbed of emulated devices without a platform
      needs others with fewer and with more of them.
  """
  emulated = {
    testbed.workers: measured
    for testbed, measured in found.items()
    if testbed.rate is None and measured.platform is not None
  }
  pairs = []
  for testbed, measured in found.items():
    known = {case: measured.seconds[case] for case in grid.known}
    platform, alone = measured.platform, predict.Alone(known)
    if platform is None:
      workers = testbed.workers
      platform = predict.emulated_between(
        {n: m.platform for n, m in emulated.items() if m.platform}, workers
      )
      alone = predict.alone_between(
        {n: {c: m.seconds[c] for c in grid.known} for n, m in emulated.items()},
        workers,
      )
    for case in grid.held_out:
      held = grid.held(case)
      if measured.platform is None:
        held = f"workers, {held}"
      pairs.append(
        Pair(
          testbed.name,
          f"width {case.width} batch {case.batch}",
          case.exchange,
          held,
          predict.predict(platform, alone, case),
          measured.seconds[case],
          measured.noise[case],
        )
      )
  return pairs


def _testbeds(console: rich.console.Console) -> dict[Testbed, bool]:
  """Those of the flags that can be made here."""
  found = {Testbed(int(n)): True for n in _EMULATED.value}
  found |= {Testbed(int(n)): False for n in _BETWEEN.value}
  rates = list(_RATES.value)
  limited = [rate for rate in rates if rate != "loopback"]
  why = links.explain_refusal() if limited else None
  if why:
    links.enter_user_namespace([sys.executable, *sys.orig_argv[1:]])
    console.print(f"Not measured: {', '.join(limited)}; {why}")
    rates = [rate for rate in rates if rate not in limited]
  return found | {Testbed(2, rate): True for rate in rates}


def main() -> None:
  """Measures, predicts, and prints how well."""
  console = make_console()
  grid = cases.make_grid(
    [int(width) for width in _KNOWN_WIDTHS.value],
    [int(batch) for batch in _KNOWN_BATCHES.value],
    [_shape(text) for text in _SHAPES.value],
    _EXCHANGES.value,
  )
  effort = Effort(_LARGEST.value, _SIZES.value, _ROUNDS.value, _STEPS.value)
  signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
  try:
    found = {
      testbed: measure(testbed, calibrated, grid, effort, console)
      for testbed, calibrated in _testbeds(console).items()
    }
    pairs = compare(grid, found)
  except (HostError, ValueError) as error:
    raise SystemExit(f"Stopped: {error}") from error
  chosen = decisions(pairs)
  console.print(report.make_step_table(pairs))
  console.print(report.make_decision_table(chosen))
  console.print(report.make_error_table(pairs))
  if _JSON.value:
    records.write_rows(_JSON.value, report.make_rows(pairs, chosen))
  if _PLOT.value:
    report.save_plot(pairs, pathlib.Path(_PLOT.value))


def _shape(text: str) -> tuple[int, int]:
  try:
    width, batch = map(int, text.split("x"))
  except ValueError:
    raise app.UsageError(
      f"`--shapes` must be WIDTHxBATCH, got {text!r}."
    ) from None
  return width, batch


if __name__ == "__main__":
  shared_flags.run_main(main)
