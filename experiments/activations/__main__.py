"""Measures how well the activations of ReLU networks compress as they train.

  python -m experiments.activations --json=docs/results/activations.jsonl \
    --plot=docs/results/activations.png

Trains narrow forms of the networks of cDMA (arXiv:1705.01626) on real images
and measures, layer by layer and several times on the way, the share of zeros
and the bytes of run-length coding, of cDMA's zero-value coding, of
`jaxmotion.codecs.zero_value` in float32 and in bf16 words, and of byte planes
under zlib, which is what a host could do. What room a tile of `zero_value` has
is calibrated with other images than those that are measured.

A second table predicts, from datasheets, what the ratios would gain a step that
offloads all activations of the networks at full size. bf16 loses digits of
each value; all else is lossless.
"""

import time
from collections.abc import Sequence

import rich.console
from absl import flags

from experiments import models
from experiments.activations import measure, sampling, tables
from experiments.activations.rows import make_rows
from experiments.common import records, shared_flags
from experiments.common.console import make_console
from experiments.common.progress import Display

_NETS = flags.DEFINE_list("nets", list(sampling.WIDTHS), "Names of networks.")
_DATA = flags.DEFINE_enum(
  "data", "digits", ["digits", "photographs"], "What they learn."
)
_IMAGE = flags.DEFINE_integer("image", 32, "Pixels of a side.", 32)
_LOOKS = flags.DEFINE_list(
  "looks", ["0", "5", "15", "40", "120"], "Steps at which to measure."
)
_BATCH = flags.DEFINE_integer(
  "batch", 32, "Images of a step.", 1, allow_override=True
)
_SEED = flags.DEFINE_integer("seed", 0, "Of a run.", allow_override=True)
_JSON = shared_flags.define_rows()
_PLOT = shared_flags.define_plot()


def run(
  nets: Sequence[str],
  *,
  data: str,
  image: int,
  steps: Sequence[int],
  batch: int,
  seed: int,
  console: rich.console.Console,
) -> list[measure.Measured]:
  """Trains and measures.

  Args:
    nets: names of networks.
    data: "digits" or "photographs".
    image: pixels of a side.
    steps: at which to measure, ascending; the last ends the training.
    batch: images of a step.
    seed: of parameters and batches.
    console: where to show progress.

  Raises:
    ValueError: a network is not one of ReLUs, or the steps do not ascend.
  """
  for name in nets:
    if name not in sampling.WIDTHS:
      raise ValueError(
        f"`nets` must be some of {', '.join(sampling.WIDTHS)}, got {name!r}."
      )
  if not steps or list(steps) != sorted(set(steps)) or steps[0] < 0:
    raise ValueError(f"`looks` must ascend from 0 or more, got {steps}.")
  images = sampling.load(data, image)
  measured = []
  with Display(console, steps=steps[-1], runs=len(nets)) as display:
    for name in nets:
      net = models.make_network(
        name, image=image, classes=images.classes, width=sampling.WIDTHS[name]
      )
      began = time.perf_counter()
      looks = sampling.train(
        net,
        images,
        steps=steps,
        batch=batch,
        seed=seed,
        on_step=display.begin_run(name, seed),
      )
      for look in looks:
        measured.append(measure.measure(name, look))
      layer, payload_bytes = measure.check(look)
      console.print(f"{name}: {layer} really takes {payload_bytes:,} bytes")
      spent_ms = 1e3 * (time.perf_counter() - began) / max(1, steps[-1])
      display.end_run(name, seed, look.accuracy, spent_ms)
  return measured


def main() -> None:
  """Does what the flags say."""
  console = make_console()
  measured = run(
    _NETS.value,
    data=_DATA.value,
    image=_IMAGE.value,
    steps=[int(step) for step in _LOOKS.value],
    batch=_BATCH.value,
    seed=_SEED.value,
    console=console,
  )
  rows = make_rows(measured)
  console.print(tables.ratio_table(rows))
  console.print(tables.gain_table(rows))
  if _JSON.value:
    records.write_rows(_JSON.value, rows)
  if _PLOT.value:
    tables.save_plot(rows, _PLOT.value)


if __name__ == "__main__":
  shared_flags.run_main(main)
