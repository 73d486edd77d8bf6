"""Names and options that a command line may have got wrong."""

import difflib
import json
import math
from collections.abc import Iterable, Sequence

from experiments.common import console


def check_name(text: str, known: Iterable[str], what: str = "") -> None:
  """Raises unless a text is one of the known names.

  Args:
    text: what somebody wrote.
    known: names that exist.
    what: what the text was given as, unless the error says that already.

  Raises:
    JobError: it is no such name; the message has the nearest one, if any.

  >>> check_name("int", ["int4"], "`codec`")
  Traceback (most recent call last):
  ...
  experiments.common.console.JobError: `codec` must be one of int4, got 'int'; \
did you mean 'int4'?
  """
  names = list(known)
  if text in names:
    return
  near = difflib.get_close_matches(text, names, n=1)
  end = f"; did you mean {near[0]!r}?" if near else "."
  place = f"{what} " if what else ""
  raise console.JobError(
    f"{place}must be one of {', '.join(names)}, got {text!r}{end}"
  )


def parse_options(
  texts: Sequence[str], known: Iterable[str], what: str
) -> dict[str, float]:
  """Returns the options of a network or of a model.

  Args:
    texts: each OPTION=VALUE, a positive number, `true` or `false`.
    known: names of the options that exist.
    what: whose options they are.

  Raises:
    JobError: there is no such option, or it cannot have such a value.

  >>> parse_options(["layers=2", "flash=true"], ["layers", "flash"], "gpt")
  {'layers': 2, 'flash': True}
  """
  known, options = list(known), {}
  for text in texts:
    name, _, value = text.partition("=")
    check_name(name, known, f"OPTION of {what}")
    try:
      options[name] = json.loads(value)
    except ValueError:
      options[name] = None
    if type(options[name]) is bool:
      continue
    is_number = type(options[name]) in (int, float)
    if not is_number or not 0 < options[name] < math.inf:
      raise console.JobError(
        f"{name} of {what} must be a positive number, true or false, got"
        f" {value!r}."
      )
  return options
