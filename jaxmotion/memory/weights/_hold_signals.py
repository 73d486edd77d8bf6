"""`hold_signals`: a block of code that Ctrl-C cannot interrupt."""

import contextlib
import signal
import threading
from collections.abc import Iterator
from typing import Any


@contextlib.contextmanager
def hold_signals() -> Iterator[None]:
  """Postpones signals that Python handles to the end of the block.

  A handler such as that of Ctrl-C raises between any two operations: also
  after a program has taken its donated arguments, and before its results have
  a name. In other threads than the main one no handler runs, so nothing is
  postponed.

  Example:
    >>> done = []
    >>> with hold_signals():  # Ctrl-C raises below, if it is pressed here.
    ...   done.append("work")
  """
  if threading.current_thread() is not threading.main_thread():
    yield
    return
  held: list[int] = []
  replaced: list[tuple[signal.Signals, Any]] = []
  try:
    for number in sorted(signal.valid_signals()):
      handler = signal.getsignal(number)
      if callable(handler):
        # Listed first, so that a signal in between cannot leave it replaced.
        replaced.append((number, handler))
        signal.signal(number, lambda number, frame: held.append(number))
    yield
  finally:
    # Ctrl-C last: its handler may raise as soon as it is back.
    for number, handler in reversed(replaced):
      signal.signal(number, handler)
    for number_held in held:
      signal.raise_signal(number_held)
