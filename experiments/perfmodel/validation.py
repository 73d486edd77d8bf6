"""Validation: measures held-out steps on testbeds and predicts them."""

import pathlib
from collections.abc import Mapping

import rich.console
import rich.progress

from experiments.common import files
from experiments.perfmodel import cases, predict, score
from experiments.perfmodel.testbed import (
  Effort,
  Measured,
  Testbed,
  compile_cases,
  run_round,
  start_calibration,
  start_processes,
  summarize_rounds,
)
from jaxmotion import perfmodel


def measure_testbed(
  testbed: Testbed,
  is_calibrated: bool,
  grid: cases.Grid,
  effort: Effort,
  console: rich.console.Console,
  platforms: str | None,
) -> Measured:
  """Calibrates a testbed and runs all cases on it, in alternating rounds."""
  codecs = {case.exchange for case in grid.held_out} - {"none", "fp32"}
  path = platforms and pathlib.Path(platforms, f"{testbed.name}.json")
  platform, rounds = None, []
  if path and path.exists():
    try:
      platform = perfmodel.load_platform(path)
    except (OSError, TypeError, ValueError) as error:
      raise files.FileError(str(error)) from error
  is_stored = platform is not None
  with (
    start_processes(testbed) as processes,
    rich.progress.Progress(console=console, transient=True) as progress,
  ):
    task = progress.add_task(f"{testbed.name}: compiling", total=None)
    compile_cases(processes, grid)
    if is_calibrated and not is_stored:
      start_calibration(testbed, processes, sorted(codecs), effort)
    progress.update(
      task, description=f"{testbed.name}: running", total=effort.rounds
    )
    for _ in range(effort.rounds):
      rounds.append(run_round(processes, effort.steps))
      progress.advance(task)
    if is_calibrated and not is_stored:
      reply = processes.ask({"do": "platform"})
      platform = perfmodel.platform_from_dict(reply[0]["platform"])
      if path:
        path.parent.mkdir(parents=True, exist_ok=True)
        perfmodel.save_platform(platform, path)
  return summarize_rounds(grid, rounds, platform)


def compare_steps(
  grid: cases.Grid, found: Mapping[Testbed, Measured]
) -> list[score.Pair]:
  """Predicts the held-out cases of all testbeds."""
  emulated = {
    testbed.workers: measured
    for testbed, measured in found.items()
    if testbed.rate is None and measured.platform is not None
  }
  pairs = []
  for testbed, measured in found.items():
    known = {case: measured.seconds[case] for case in grid.known}
    platform, base_step = measured.platform, predict.BaseStepModel(known)
    if platform is None:
      workers = testbed.workers
      platform = predict.interpolate_platform(
        {n: m.platform for n, m in emulated.items() if m.platform}, workers
      )
      base_step = predict.interpolate_base_step(
        {n: {c: m.seconds[c] for c in grid.known} for n, m in emulated.items()},
        workers,
      )
    for case in grid.held_out:
      unseen = grid.list_unseen(case)
      if measured.platform is None:
        unseen = f"workers, {unseen}"
      pairs.append(
        score.Pair(
          testbed.name,
          f"width {case.width} batch {case.batch}",
          case.exchange,
          unseen,
          predict.predict_case(platform, base_step, case),
          measured.seconds[case],
          measured.noise[case],
        )
      )
  return pairs
