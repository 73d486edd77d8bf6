"""Trains one configuration under every exchange it names, and compares them.

  python -m experiments.train --config=configs/digits.py \
    --json=digits.jsonl --plot=digits.png --workdir=runs/digits

A field of the configuration is set by `--config.field=value`. With
`--workdir` a job that was killed goes on where its last checkpoint is.

Started once on each of several hosts it is one job over all of them, whose
workers are shared out equally; see `_distributed` for the flags. `--workdir` is
then a folder that all hosts see.
"""

import pathlib
from collections.abc import Sequence

from absl import app, flags
from ml_collections import config_flags

from experiments import _distributed, _job

_ROOT = pathlib.Path(__file__).parents[1]

_CONFIG = config_flags.DEFINE_config_file(
  "config", str(_ROOT / "configs" / "digits.py"), "What to run."
)
_JSON = flags.DEFINE_string("json", None, "Where to write rows (JSON Lines).")
_PLOT = flags.DEFINE_string("plot", None, "Where to write the plot (PNG).")
_WORKDIR = flags.DEFINE_string(
  "workdir", None, "Where to keep checkpoints; the same folder resumes."
)


def main(argv: Sequence[str]) -> None:
  """Runs the job that the flags describe."""
  if len(argv) > 1:
    raise app.UsageError(f"Flags must start with --, got {argv[1]!r}.")
  with _distributed.join() as processes:
    _job.run(
      _CONFIG.value,
      json=_JSON.value,
      plot=_PLOT.value,
      workdir=_WORKDIR.value,
      processes=processes,
    )


if __name__ == "__main__":
  app.run(main)
