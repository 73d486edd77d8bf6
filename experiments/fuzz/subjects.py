"""Subjects of generated cases by name."""

from experiments.fuzz import exchanges, files, programs
from experiments.fuzz.run import RunRound

SUBJECTS: dict[str, RunRound] = {
  "exchanges": exchanges.run_round,
  "files": files.run_round,
  "programs": programs.run_round,
}
