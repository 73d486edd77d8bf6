"""Measures how well the activations of ReLU networks compress as they train.

  python -m experiments.activations --json=docs/results/activations.jsonl \
    --plot=docs/results/activations.png

Trains narrow forms of the networks of cDMA (arXiv:1705.01626) on real images.
At several steps it measures, layer by layer, the share of zeros and the bytes
of its codes: run lengths, cDMA's zero-value code, `jaxmotion.codecs.zero_value`
in float32 and bf16 words, and byte planes under zlib, as a host could use.
Tiles of `zero_value` are calibrated on other images than those measured.

A second table predicts, from datasheets, how much faster the ratios make a step
that offloads all activations of the networks at full size. bf16 rounds each
value; the other codes are lossless.
"""

from absl import flags

from experiments.activations import measure, rows as activations_rows
from experiments.common import list_flags, records, shared_flags
from experiments.common.console import make_console
from experiments.models import training

_NETS = list_flags.define_names(
  "nets", training.NARROW_WIDTHS, training.NARROW_WIDTHS, "Names of networks."
)
_DATA = flags.DEFINE_enum(
  "data", "digits", ["digits", "photographs"], "Images to train on."
)
_IMAGE = flags.DEFINE_integer(
  "image", 32, "Height and width of the images.", 32
)
_LOOKS = list_flags.define_numbers(
  "looks",
  [0, 5, 15, 40, 120],
  "Steps at which to measure; they ascend.",
  low=0,
  check=measure.check_steps,
)
_BATCH = flags.DEFINE_integer(
  "batch", 32, "Images in a batch.", 1, allow_override=True
)
_SEED = flags.DEFINE_integer(
  "seed", 0, "Seed of parameters and batches.", allow_override=True
)
_JSON = shared_flags.define_rows()
_PLOT = shared_flags.define_plot()


def main() -> None:
  """Measures the networks, prints tables, writes rows and a plot."""
  console = make_console()
  measured = measure.measure_networks(
    _NETS.value,
    data=_DATA.value,
    image=_IMAGE.value,
    steps=_LOOKS.value,
    batch=_BATCH.value,
    seed=_SEED.value,
    console=console,
  )
  rows = activations_rows.make_rows(measured)
  console.print(activations_rows.ratio_table(rows).to_console())
  console.print(activations_rows.gain_table(rows).to_console())
  records.write_rows(_JSON.value, rows)
  if _PLOT.value:
    from experiments.activations.plot import save_plot  # Imports matplotlib.

    save_plot(rows, _PLOT.value)


if __name__ == "__main__":
  shared_flags.run_main(main)
