"""Progress: a live table on a terminal or plain lines, and event files."""

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import rich.console
import rich.progress
import rich.table

from experiments.common.console import JobError

_LINES_PER_RUN = 4  # Of plain output.
_ROWS = 12  # Of the live table: the last runs.
_COLUMNS = ("run", "steps", "loss", "score", "step, ms")


class _LiveProgress(rich.progress.Progress):
  """Progress bars below a table of the runs so far."""

  rows: list[tuple[str, ...]]

  def get_renderables(self) -> Iterable[rich.console.RenderableType]:
    """Yields the table, then the bars."""
    if getattr(self, "rows", None):
      table = rich.table.Table(box=None, pad_edge=False, header_style="bold")
      for name in _COLUMNS:
        table.add_column(name, justify="left" if name == "run" else "right")
      for row in self.rows[-_ROWS:]:
        table.add_row(*row)
      yield table
    yield from super().get_renderables()


class Display:
  """Progress of a job, shown while the context is entered."""

  def __init__(self, console: rich.console.Console, *, steps: int, runs: int):
    self._console = console
    self._steps = steps
    self._bar = _LiveProgress(
      rich.progress.TextColumn("{task.description}"),
      rich.progress.BarColumn(),
      rich.progress.MofNCompleteColumn(),
      rich.progress.TimeRemainingColumn(),
      console=console,
      disable=not console.is_terminal,
    )
    self._bar.rows = []
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
    self._bar.rows.append((name, "0", "", "", ""))

    def on_step(done: int, loss: float) -> None:
      text = f"{name}  loss {loss:.4f}"
      self._bar.rows[-1] = (name, str(done), f"{loss:.4f}", "", "")
      self._bar.update(self._part, completed=done, description=text)
      self._bar.update(self._whole, completed=self._ended * self._steps + done)
      if not self._console.is_terminal and done % every == 0:
        self._console.print(f"{text}  step {done}/{self._steps}")

    return on_step

  def end_run(self, case: str, seed: int, score: float, step_ms: float) -> None:
    """Ends a run: its row is complete, or a plain line tells of it."""
    self._ended += 1
    if self._console.is_terminal:
      row = self._bar.rows[-1]
      self._bar.rows[-1] = (*row[:3], f"{score:.3f}", f"{step_ms:.1f}")
      return
    self._console.print(
      f"{case} seed {seed}: score {score:.3f}, step {step_ms:.1f} ms"
    )


class ScalarWriter:
  """Writes the scalars of one run, from its first step or where it resumes."""

  def __init__(self, folder: Path, *, is_quiet: bool = False):
    self._folder, self._is_quiet = folder, is_quiet
    self._writer: Any = None
    try:
      import tensorboardX
    except ImportError as error:
      raise JobError(
        "`--tensorboard` needs tensorboardX: pip install tensorboardX, or the"
        " extra `experiments`."
      ) from error
    self._make = tensorboardX.SummaryWriter

  def write(self, step: int, scalars: Mapping[str, Any]) -> None:
    """Writes scalars of one step."""
    if self._is_quiet:
      return
    if self._writer is None:
      # A killed run wrote steps that a resumed one repeats: hide these.
      self._writer = self._make(str(self._folder), purge_step=step)
    for name, value in scalars.items():
      self._writer.add_scalar(name, float(value), step)

  def close(self) -> None:
    """Writes what is left to the disk."""
    if self._writer is not None:
      self._writer.close()
