"""Signals that ask a job to end: it says so in one line and ends soon."""

import os
import signal
import sys
import threading
import time
from types import FrameType

GRACE_S = 2
"""Seconds that the main thread has to end, before the process ends anyway."""

_SHOW_CURSOR = "\x1b[?25h"
_said = threading.Event()


class StopSignal(KeyboardInterrupt):
  """A signal asks this process to end.

  Args:
    number: number of the signal.
  """

  def __init__(self, number: int):
    super().__init__(f"stopped by {signal.Signals(number).name}")
    self.code = 128 + number


def end_on_signals() -> None:
  """Makes SIGINT and SIGTERM raise `StopSignal` in the main thread.

  Python runs handlers only between its own instructions. A compilation, or a
  collective whose other workers are gone, can keep the main thread from its
  handler, so another thread ends the process after `GRACE_S`. A process may
  end at any moment: checkpoints get their names when they are complete.
  """
  if threading.current_thread() is not threading.main_thread():
    return
  reader, writer = os.pipe()
  os.set_blocking(writer, False)
  signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
  for number in (signal.SIGINT, signal.SIGTERM):
    if signal.getsignal(number) != signal.SIG_IGN:
      signal.signal(number, _raise_stop)
  watch = threading.Thread(target=_end_late, args=(reader,), daemon=True)
  watch.start()


def say_stopped(stop: KeyboardInterrupt, who: str = "Stopped") -> int:
  """Prints the one line of a stopped process and returns its exit code.

  Args:
    stop: what ended the main thread.
    who: first word of the line.
  """
  if not _said.is_set():
    _said.set()
    reason = str(stop) or "stopped by SIGINT"
    print(f"{who}: {reason}.", file=sys.stderr, flush=True)
  return getattr(stop, "code", 128 + signal.SIGINT)


def _raise_stop(number: int, frame: FrameType | None) -> None:
  raise StopSignal(number)


def _end_late(reader: int) -> None:
  while (number := os.read(reader, 1)[0]) not in (
    signal.SIGINT,
    signal.SIGTERM,
  ):
    pass
  time.sleep(GRACE_S)
  if sys.stdout.isatty():  # A progress bar hides the cursor.
    sys.stdout.write(_SHOW_CURSOR)
    sys.stdout.flush()
  os._exit(say_stopped(StopSignal(number)))
