"""A live progress bar on a terminal, plain lines anywhere else."""

from collections.abc import Callable
from types import TracebackType

import rich.console
import rich.progress

_LINES_PER_RUN = 4  # Of plain output.


class Display:
  """Progress of a job, shown while the context is entered.

  Args:
    console: console that shows the progress.
    steps: number of steps of one run.
    runs: number of runs of the job.
  """

  def __init__(self, console: rich.console.Console, *, steps: int, runs: int):
    self._console = console
    self._steps = steps
    self._bar = rich.progress.Progress(
      rich.progress.TextColumn("{task.description}"),
      rich.progress.BarColumn(),
      rich.progress.MofNCompleteColumn(),
      rich.progress.TimeRemainingColumn(),
      console=console,
      disable=not console.is_terminal,
    )
    self._whole = self._bar.add_task("all runs", total=runs * steps)
    self._part = self._bar.add_task("", total=steps)
    self._ended = 0

  def __enter__(self) -> "Display":
    self._bar.start()
    return self

  def __exit__(
    self,
    kind: type[BaseException] | None,
    error: BaseException | None,
    trace: TracebackType | None,
  ) -> None:
    self._bar.stop()

  def begin_run(self, case: str, seed: int) -> Callable[[int, float], None]:
    """Starts a run and returns a function to call with steps done and loss."""
    name = f"{case} seed {seed}"
    every = max(1, self._steps // _LINES_PER_RUN)
    self._bar.reset(self._part, total=self._steps)

    def on_step(done: int, loss: float) -> None:
      text = f"{name}  loss {loss:.4f}"
      self._bar.update(self._part, completed=done, description=text)
      self._bar.update(self._whole, completed=self._ended * self._steps + done)
      if not self._console.is_terminal and done % every == 0:
        self._console.print(f"{text}  step {done}/{self._steps}")

    return on_step

  def end_run(self, case: str, seed: int, score: float, step_ms: float) -> None:
    """Ends a run and prints one line about it."""
    self._ended += 1
    self._console.print(
      f"{case} seed {seed}: score {score:.3f}, step {step_ms:.1f} ms"
    )
