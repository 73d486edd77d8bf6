"""Subjects of generated cases by name."""

from experiments.fuzz import codecs, exchanges, fault_files, files, programs
from experiments.fuzz.run import RunRound

SUBJECTS: dict[str, RunRound] = {
  "checkpoints": fault_files.run_round,
  "codecs": codecs.run_round,
  "exchanges": exchanges.run_round,
  "files": files.run_round,
  "programs": programs.run_round,
}
