"""`hold_signals`: a block of code that Ctrl-C cannot interrupt."""

import contextlib
import signal
import threading
from collections.abc import Iterator


@contextlib.contextmanager
def hold_signals() -> Iterator[None]:
  """Postpones signals that Python handles to the end of the block.

  A handler such as that of Ctrl-C raises between any two operations. It may do
  so after a program has taken its donated arguments and before its results have
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
  try:
    # Puts back every handler, even if one that is back already raises.
    with contextlib.ExitStack() as stack:
      # Ctrl-C has a low number, so that its handler is among the last ones.
      for number in sorted(signal.valid_signals()):
        handler = signal.getsignal(number)
        if callable(handler):
          stack.callback(signal.signal, number, handler)
          signal.signal(number, lambda number, frame: held.append(number))
      yield
  finally:
    with contextlib.ExitStack() as stack:
      for number_held in reversed(held):
        stack.callback(signal.raise_signal, number_held)
