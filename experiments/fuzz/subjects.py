"""Subjects of generated cases by name."""

from experiments.fuzz import files
from experiments.fuzz.run import RunRound

SUBJECTS: dict[str, RunRound] = {"files": files.run_round}
