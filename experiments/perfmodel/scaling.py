r"""Predicts where splitting the batch, the channels, or compressing wins.

  python -m experiments.perfmodel.scaling --json=perfmodel_scaling.jsonl \
    --plot=perfmodel_scaling.png

The study of Castello et al. (2021), with compression: data parallelism against
model parallelism (channels of every layer split). One axis is swept at a time
around a cluster of `--study_workers` nodes: images per batch, FLOP/s of a node,
rate of its memory, rate of its link, and the number of nodes. Everything is
predicted by `jaxmotion.perfmodel`; nothing is measured.
"""

from absl import flags

from experiments.common import console, list_flags, records, shared_flags
from experiments.perfmodel import plot, reference, sweep, tables
from experiments.perfmodel.rows import scaling_rows

_NETWORKS = list_flags.define_names(
  "networks",
  ["alexnet", "vgg16", "resnet50", "googlenet"],
  reference.NETWORKS,
  "Reference networks.",
)
_AXES = list_flags.define_names(
  "axes", sweep.AXES, sweep.AXES, "Axes to sweep."
)
_WORKERS = flags.DEFINE_integer(
  "study_workers", 64, "Nodes where their number is not swept.", 2
)
_BATCH = flags.DEFINE_integer(
  "study_batch", 1024, "Images per batch where they are not swept.", 1
)
_JSON = shared_flags.define_rows()
_PLOT = shared_flags.define_plot()


def main() -> None:
  """Predicts steps, prints the fastest strategies, writes rows and plot."""
  points = sweep.sweep_axes(
    _NETWORKS.value, _AXES.value, _WORKERS.value, _BATCH.value
  )
  console.make_console().print(tables.scaling_table(points).to_console())
  rows = scaling_rows(points)
  records.write_rows(_JSON.value, rows)
  if _PLOT.value:
    plot.plot_scaling(rows, _PLOT.value)


if __name__ == "__main__":
  shared_flags.run_main(main)
