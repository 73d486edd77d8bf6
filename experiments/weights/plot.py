"""Plot of errors and precisions over the steps."""

import os
from collections.abc import Mapping, Sequence

from matplotlib.axes import Axes

from experiments.common import figures
from experiments.weights import trainer


def save_plot(
  runs: Sequence[trainer.Run],
  bits: Mapping[str, Sequence[int]],
  path: str | os.PathLike,
) -> None:
  """Draws the error of every case and the precision of every layer."""
  figure = figures.make_figure(6 + 5 * len(bits), 4.5)
  first, *others = figure.subplots(1, 1 + len(bits), squeeze=False)[0]
  for case in dict.fromkeys(run.case for run in runs):
    curves = [run.curve for run in runs if run.case == case]
    shortest = min(map(len, curves))
    points = zip(*(curve[:shortest] for curve in curves), strict=True)
    mean = [(p[0][0], sum(e for _, e in p) / len(p)) for p in points]
    first.plot(*zip(*mean, strict=True), label=case)
  first.set_xlabel("steps")
  first.set_ylabel("error on held-out images, %, mean over the seeds")
  first.set_yscale("log")
  first.grid(alpha=0.3)
  first.set_title("Accuracy of compressed weights")
  first.legend(fontsize="small", loc="upper left", bbox_to_anchor=(0, -0.15))
  for axes, (case, bits_of_level) in zip(others, bits.items(), strict=True):
    run = next(run for run in runs if run.case == case)
    _draw_trajectory(axes, run, bits_of_level)
  figures.save_figure(figure, path)


def _draw_trajectory(
  axes: Axes, run: trainer.Run, bits_of_level: Sequence[int]
) -> None:
  """Draws the bits of every group of weights over the steps of a run."""
  for i, group in enumerate(run.groups):
    changes = [(step, level) for step, g, level in run.switches if g == i]
    steps = [step for step, _ in changes] + [run.steps]
    # A factor of 1 % separates lines that would coincide (logarithmic axis).
    bits = [
      bits_of_level[level] * 1.01 ** (i - len(run.groups) / 2)
      for _, level in changes
    ]
    axes.step(steps, [*bits, bits[-1]], where="post", label=group)
  axes.set_yscale("log", base=2)
  axes.set_ylim(bits_of_level[0] / 2, bits_of_level[-1] * 2)
  axes.set_yticks(bits_of_level, map(str, bits_of_level))
  axes.minorticks_off()
  axes.set_xlabel("steps")
  axes.set_ylabel("bits of a weight")
  axes.set_title(f"Bits of every layer: {run.case}, seed {run.seed}")
  axes.grid(alpha=0.3)
  axes.legend(
    fontsize="x-small", ncols=3, loc="upper left", bbox_to_anchor=(0, -0.15)
  )
