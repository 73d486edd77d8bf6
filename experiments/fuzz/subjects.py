"""Subjects of generated cases by name."""

from experiments.common import names
from experiments.fuzz import (
  codecs,
  exchanges,
  fault_files,
  files,
  programs,
  run,
)

SUBJECTS: dict[str, run.RunRound] = {
  "checkpoints": fault_files.run_round,
  "codecs": codecs.run_round,
  "exchanges": exchanges.run_round,
  "files": files.run_round,
  "programs": programs.run_round,
}

# Relative times. A program costs about 1 s of compilation, a codec's case 6 ms.
SHARES: dict[str, float] = {
  "checkpoints": 0.7,
  "codecs": 3.6,
  "exchanges": 2.0,
  "files": 0.7,
  "programs": 13.0,
}


def parse_round(text: str) -> tuple[str, int]:
  """Returns the subject and the seed of a round.

  Args:
    text: SUBJECT:SEED.

  Raises:
    ValueError: there is no such subject, or the text has another form.

  >>> parse_round("codecs:17")
  ('codecs', 17)
  """
  name, colon, seed = text.partition(":")
  if not colon or not seed.isdecimal():
    raise ValueError(f"must be SUBJECT:SEED, such as codecs:17, got {text!r}.")
  names.check_name(name, SUBJECTS, "SUBJECT")
  return name, int(seed)
