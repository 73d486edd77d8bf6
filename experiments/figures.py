"""Draws the figures of the pages again, from the rows beside them.

  python -m experiments.figures docs/results/*.jsonl

Each file of rows for which there is a figure gets one: `train_digits.jsonl` a
`train_digits.png`.
"""

import fnmatch
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from absl import app

from experiments.activations import plot as activations
from experiments.common import records
from experiments.hetero import plot as hetero
from experiments.hosts import plot as hosts
from experiments.perfmodel import plot as perfmodel
from experiments.race import plot as race
from experiments.residuals import plot as residuals
from experiments.study import plot as study
from experiments.train import plot as train

FIGURES: dict[str, Callable[[Sequence[Any], Any], None]] = {
  "activations": activations.save_plot,
  "hetero": hetero.save_plot,
  "hosts_2_100mbit_overlap": hosts.save_plot,
  "hosts_2_1gbit_overlap": hosts.save_plot,
  "perfmodel_scaling": perfmodel.plot_scaling,
  "perfmodel_validate": perfmodel.plot_validation,
  "race": race.save_plot,
  "residuals": residuals.save_plot,
  "residuals_compare": residuals.save_frontiers,
  "study*": study.save_plot,
  "train_digits": train.save_plot,
}
"""Figure of a file of rows, by a pattern of its name."""


def draw_figures(paths: Sequence[str]) -> list[Path]:
  """Draws the figures of files of rows, and returns where they are."""
  drawn = []
  for path in map(Path, paths):
    for pattern, draw in FIGURES.items():
      if fnmatch.fnmatch(path.stem, pattern):
        drawn.append(path.with_suffix(".png"))
        draw(records.read_rows(path), drawn[-1])
  return drawn


def main(argv: Sequence[str]) -> None:
  """Draws, and prints the path of each figure."""
  if len(argv) < 2:
    raise app.UsageError("Name at least one file of rows, got none.")
  for path in draw_figures(argv[1:]):
    print(path)


if __name__ == "__main__":
  app.run(main)
