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

# Relative times. A program costs about 1 s of compilation, a codec's case 6 ms.
SHARES: dict[str, float] = {
  "checkpoints": 1.0,
  "codecs": 4.0,
  "exchanges": 2.0,
  "files": 1.0,
  "programs": 12.0,
}
