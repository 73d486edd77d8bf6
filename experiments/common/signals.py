"""Signals that ask a job to end: it says so in one line and ends at once."""

import os
import signal
import sys
import threading
from types import FrameType
from typing import NoReturn

_SHOW_CURSOR = "\x1b[?25h"
_NUMBERS = signal.SIGINT, signal.SIGTERM


def end_on_signals() -> None:
  """Makes SIGINT and SIGTERM end this process at once, with one line."""
  # Python runs handlers only between its own instructions. A compilation, or a
  # collective whose other workers are gone, can keep the main thread from its
  # handler. An exception of a handler is lost if it is raised in a callback of
  # another library. Therefore a thread ends the process. A job may end at any
  # moment: checkpoints get their names when they are complete. Nothing undoes
  # this, so call it only where a program starts.
  if threading.current_thread() is not threading.main_thread():
    return
  reader, writer = os.pipe()
  os.set_blocking(writer, False)
  signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
  for number in _NUMBERS:
    if signal.getsignal(number) != signal.SIG_IGN:
      signal.signal(number, _do_nothing)
  watch = threading.Thread(target=_end_process, args=(reader,), daemon=True)
  watch.start()


def exit_on_sigterm() -> None:
  """Makes SIGTERM an exception that ends this process with one line."""
  # What the process has started, such as other processes, ends with it. Use it
  # where `end_on_signals`, which leaves no context, would leave something
  # behind.
  if signal.getsignal(signal.SIGTERM) == signal.SIG_DFL:
    signal.signal(signal.SIGTERM, _exit_process)


def _exit_process(number: int, frame: FrameType | None) -> NoReturn:
  print(describe_stop(number), file=sys.stderr)
  raise SystemExit(128 + number)


def describe_stop(number: int) -> str:
  """Returns the line of a process that a signal has stopped."""
  return f"Stopped by {signal.Signals(number).name}."


def _do_nothing(number: int, frame: FrameType | None) -> None:
  """Stands for the thread, which the signal has woken."""


def _end_process(reader: int) -> None:
  while (number := os.read(reader, 1)[0]) not in _NUMBERS:
    pass
  # A progress bar hides the cursor.
  start = _SHOW_CURSOR if sys.stderr.isatty() else ""
  # Not by way of `sys.stderr`, which the main thread may hold.
  os.write(2, f"{start}{describe_stop(number)}\n".encode())
  os._exit(128 + number)
