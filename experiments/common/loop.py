"""Training loops: the steps of one run, and all runs of a job."""

import math
import time
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

from experiments.common.checkpoint import CheckpointStore, Elastic, Log
from experiments.common.progress import Display
from experiments.common.workdir import Workdir

State = TypeVar("State")
OnStep = Callable[[int, float], None]
"""Receives the number of steps done and the loss of the last."""


def ignore_step(done: int, loss: float) -> None:
  """Does nothing after a step: the default `on_step`."""


def run_steps(
  state: State,
  step: Callable[[State, Any], tuple[State, float]],
  load_batch: Callable[[int], Any],
  *,
  steps: int,
  checkpoint_every: int,
  store: CheckpointStore | None = None,
  elastic: Elastic | None = None,
  stop: int | None = None,
  evaluate: Callable[[int, State], None] | None = None,
  on_step: OnStep = ignore_step,
) -> tuple[State, Log]:
  """Runs the steps of one run, from its latest checkpoint if there is one."""
  # A loss that is not finite ends the run after that step, which is in the log
  # but neither evaluated nor in a checkpoint.
  # Returns the state after the last step, and the log from the first step on.
  log = Log([], [])
  if store:
    state, log = store.restore(state, elastic)
  for done in range(len(log.loss) + 1, (steps if stop is None else stop) + 1):
    batch = load_batch(done - 1)
    begin = time.perf_counter()
    state, loss = step(state, batch)
    log.step_ms.append(1e3 * (time.perf_counter() - begin))
    log.loss.append(loss)
    if not math.isfinite(loss):
      break
    if evaluate:
      evaluate(done, state)
    if store and (done % checkpoint_every == 0 or done == steps):
      store.save(state, log, elastic.layout if elastic else None)
    on_step(done, loss)
  return state, log


def run_cases(
  cases: Iterable[str],
  seeds: Iterable[int],
  run_case: Callable[[str, int, CheckpointStore | None, OnStep], Any],
  score_run: Callable[[Any], tuple[float, float]],
  *,
  workdir: Workdir | None = None,
  display: Display | None = None,
) -> list[Any]:
  """Runs every case with every seed, except runs that `workdir` already has."""
  # Seeds are the outer loop, so that a slow minute of the machine falls on all
  # cases alike.
  # `score_run`: returns score and milliseconds per step of a record.
  finished = workdir.read_runs() if workdir else []
  records = {(run[0], run[1]): run for run in finished}
  cases = tuple(cases)
  wanted = [(case, seed) for seed in seeds for case in cases]
  for case, seed in wanted:
    if (case, seed) in records:
      continue
    on_step = display.begin_run(case, seed) if display else ignore_step
    store = workdir.open_store(case, seed) if workdir else None
    run = run_case(case, seed, store, on_step)
    records[case, seed] = run
    if workdir:
      workdir.add_run(run)
    if display:
      display.end_run(case, seed, *score_run(run))
  return [records[key] for key in wanted]
