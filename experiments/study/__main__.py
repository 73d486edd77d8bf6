r"""Compares published algorithms at equal steps, equal bytes and equal time.

  python -m experiments.study --config=configs/study_decoder.py \
    --json=study.jsonl --plot=study.png --workdir=runs/study

Every algorithm has five trials of its learning rates, then trains with several
seeds and several numbers of steps. Rows are written after every run. The same
`--workdir` goes on where a stopped job has ended.

Workers are emulated devices of this machine, so that times of a step without
its link are emulated, and times of links are predicted from the collectives of
the traced program.
"""

from experiments.common import shared_flags, signals
from experiments.study import run

_CONFIG = shared_flags.define_config("study_decoder")
_JSON = shared_flags.define_rows()
_PLOT = shared_flags.define_plot()
_WORKDIR = shared_flags.define_workdir()


def main() -> None:
  """Runs the study that the flags describe."""
  run.run_experiment(
    _CONFIG.value, json=_JSON.value, plot=_PLOT.value, workdir=_WORKDIR.value
  )


if __name__ == "__main__":
  signals.end_on_signals()
  shared_flags.run_main(main)
