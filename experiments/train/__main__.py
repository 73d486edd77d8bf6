"""Trains one configuration under every exchange it names, and compares them.

  python -m experiments.train --config=configs/digits.py \
    --json=digits.jsonl --plot=digits.png --workdir=runs/digits

A field of the configuration is set by `--config.field=value`. With
`--workdir` a job that was killed goes on where its last checkpoint is.

Started once on each of several hosts it is one job over all of them, whose
workers are shared out equally; see `_distributed` for the flags. `--workdir` is
then a folder that all hosts see.
"""

from experiments.common import distributed, shared_flags
from experiments.train import run

_CONFIG = shared_flags.define_config("digits")
_JSON = shared_flags.define_rows()
_PLOT = shared_flags.define_plot()
_WORKDIR = shared_flags.define_workdir()


def main() -> None:
  """Runs the job that the flags describe."""
  with distributed.join() as processes:
    run.run(
      _CONFIG.value,
      json=_JSON.value,
      plot=_PLOT.value,
      workdir=_WORKDIR.value,
      processes=processes,
    )


if __name__ == "__main__":
  shared_flags.run_main(main)
