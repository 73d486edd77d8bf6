"""Names, options and fields that a user may have got wrong."""

from __future__ import annotations

import difflib
import json
import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from experiments.common.console import JobError

if TYPE_CHECKING:  # The library's own tests run without this package.
  from ml_collections import ConfigDict


def check_name(text: str, known: Iterable[str], what: str = "") -> None:
  """Raises `JobError` with the nearest name unless a text is a known name.

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
  raise JobError(f"{place}must be one of {', '.join(names)}, got {text!r}{end}")


def parse_options(
  texts: Sequence[str], known: Iterable[str], what: str
) -> dict[str, float]:
  """Returns the options of a network or of a model.

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
      raise JobError(
        f"{name} of {what} must be a positive number, true or false, got"
        f" {value!r}."
      )
  return options


_COUNTS = (
  "steps",
  "batch_size",
  "workers",
  "checkpoint_every",
  "eval_every",
  "budget_every",
)


def check_fields(config: ConfigDict, cases: str) -> None:
  """Raises unless a job of a configuration has something to do."""
  for name in _COUNTS:
    if name in config and config[name] < 1:
      raise JobError(
        f"`config.{name}` must be an integer >= 1, got {config[name]}."
      )
  for name in (cases, "seeds"):
    found = tuple(getattr(config, name))
    if not found or len(set(found)) < len(found):
      raise JobError(
        f"`config.{name}` must have one item or more, each once, got {found}."
      )
  workers = config.get("workers", 1)
  if config.batch_size % workers:
    raise JobError(
      f"`config.batch_size` must be a multiple of the {workers} workers, got"
      f" {config.batch_size}."
    )
