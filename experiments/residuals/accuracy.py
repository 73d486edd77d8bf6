r"""Trains networks whose residuals are compressed, beside plain training.

  python -m experiments.residuals.accuracy \
    --json=docs/results/residuals_accuracy.jsonl

Each case trains from the same parameters on the same batches: `fp32` plainly,
`lossless` with the minimum cut, `int8` and `int4` with the cut in blocks of 8
and 4 bits (stochastic rounding). The table has the relative error of the first
gradient, and the accuracy on held-out images after training, over the seeds.
"""

from absl import flags

from experiments.common import list_flags, progress, records, shared_flags
from experiments.common.console import make_console
from experiments.residuals import tables, training

_NETS = list_flags.define_names(
  "nets", training.NETWORKS, training.NETWORKS, "Names of networks."
)
_STEPS = flags.DEFINE_integer(
  "steps", 150, "Number of training steps.", 2, allow_override=True
)
_BATCH = flags.DEFINE_integer(
  "batch", 32, "Images in a batch.", 1, allow_override=True
)
_SEEDS = flags.DEFINE_integer(
  "seeds", 3, "Number of runs of each case.", 1, allow_override=True
)
_IMAGE = flags.DEFINE_integer(
  "image", 32, "Height and width of the images.", 32, allow_override=True
)
_JSON = shared_flags.define_rows()


def main() -> None:
  """Trains every network in every case, prints the table and writes rows."""
  runs = len(_NETS.value) * len(training.CODECS) * _SEEDS.value
  console = make_console()
  with progress.Display(console, steps=_STEPS.value, runs=runs) as display:
    results = [
      training.train_network(
        name,
        case,
        steps=_STEPS.value,
        batch=_BATCH.value,
        seeds=_SEEDS.value,
        image=_IMAGE.value,
        display=display,
      )
      for name in _NETS.value
      for case in training.CODECS
    ]
  rows = training.make_rows(results)
  console.print(tables.accuracy_table(rows).to_console())
  records.write_rows(_JSON.value, rows)


if __name__ == "__main__":
  shared_flags.run_main(main)
