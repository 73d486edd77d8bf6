r"""Trains a network whose weights live on the host, under many codecs.

  python -m experiments.weights --config=configs/weights_vgg.py \
    --json=weights_vgg.jsonl --plot=weights_vgg.png --workdir=runs/weights_vgg

Prints the two tables of A2DTWP (arXiv:2004.02297) with our measurements beside
them: the time of a batch by its parts, and the time to an error relative to
fp32. A third table predicts the batch of VGG-A on the paper's machines from the
paper's own times, term by term. Where the host is the device, transfers are
emulated from the bytes that moved, and every such figure says so; on a GPU they
are measured. With `--workdir` a killed job continues from its last checkpoint.
"""

from absl import flags

from experiments.common import shared_flags, signals
from experiments.weights import predict, run

_CONFIG = shared_flags.define_config("weights_vgg")
_LINK = flags.DEFINE_enum(
  "link",
  "pcie3_x8",
  list(predict.HOST_LINKS),
  "Host link whose emulated times the tables show.",
)
_JSON = shared_flags.define_rows()
_PLOT = shared_flags.define_plot()
_WORKDIR = shared_flags.define_workdir()


def main() -> None:
  """Runs the job that the flags describe."""
  run.run_experiment(
    _CONFIG.value,
    link=_LINK.value,
    json=_JSON.value,
    plot=_PLOT.value,
    workdir=_WORKDIR.value,
  )


if __name__ == "__main__":
  signals.end_on_signals()
  shared_flags.run_main(main)
