"""Subjects of generated cases by name."""

from experiments.fuzz.run import RunRound

SUBJECTS: dict[str, RunRound] = {}
