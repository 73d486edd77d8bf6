r"""Trains a configuration with every exchange it names, and compares them.

  python -m experiments.train --config=configs/digits.py \
    --json=digits.jsonl --plot=digits.png --workdir=runs/digits

`--config.field=value` sets a field of the configuration. With `--workdir` a
killed job continues from its last checkpoint. `--tensorboard=DIR` logs loss,
bytes, ratio, error norms and skipped steps of every run.

Started once on each of several hosts, it is one job over all of them, with
equal shares of the workers; `experiments.common.distributed` says when it ends.
`--workdir` must then be a folder that all hosts see.
"""

from absl import flags

from experiments.common import distributed, shared_flags, signals
from experiments.train import run

_CONFIG = shared_flags.define_config("digits")
_JSON = shared_flags.define_rows()
_PLOT = shared_flags.define_plot()
_WORKDIR = shared_flags.define_workdir()
_TENSORBOARD = shared_flags.define_tensorboard()
flags.adopt_module_key_flags(distributed)


def main() -> None:
  """Runs the job that the flags describe."""
  with distributed.join_job() as processes:
    run.run_experiment(
      _CONFIG.value,
      json=_JSON.value,
      plot=_PLOT.value,
      workdir=_WORKDIR.value,
      tensorboard=_TENSORBOARD.value,
      processes=processes,
    )


if __name__ == "__main__":
  signals.end_on_signals()
  shared_flags.run_main(main)
