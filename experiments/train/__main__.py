"""Trains one configuration under every exchange it names, and compares them.

  python -m experiments.train --config=configs/digits.py \
    --json=digits.jsonl --plot=digits.png --workdir=runs/digits

A field of the configuration is set by `--config.field=value`. With
`--workdir` a job that was killed goes on where its last checkpoint is.

Started once on each of several hosts it is one job over all of them, whose
workers are shared out equally; see `_distributed` for the flags. `--workdir` is
then a folder that all hosts see.
"""

from collections.abc import Sequence

from absl import app

from experiments.common import distributed, shared_flags
from experiments.train import run

_CONFIG = shared_flags.config("digits")
_JSON = shared_flags.rows()
_PLOT = shared_flags.plot()
_WORKDIR = shared_flags.workdir()


def main(argv: Sequence[str]) -> None:
  """Runs the job that the flags describe."""
  if len(argv) > 1:
    raise app.UsageError(f"Flags must start with --, got {argv[1]!r}.")
  with distributed.join() as processes:
    run.run(
      _CONFIG.value,
      json=_JSON.value,
      plot=_PLOT.value,
      workdir=_WORKDIR.value,
      processes=processes,
    )


if __name__ == "__main__":
  app.run(main)
