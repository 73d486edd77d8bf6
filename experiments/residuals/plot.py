"""Plot of residual rows: device memory of each mode, relative to plain."""

import os
import pathlib
from collections.abc import Sequence

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from experiments.common.records import Row


def save_plot(rows: Sequence[Row], path: str | os.PathLike[str]) -> None:
  """Draws the temporaries of each mode relative to plain, by network.

  Args:
    rows: rows with `temp_bytes`.
    path: file of the image; its suffix chooses the format.
  """
  shares = {
    tuple(row.case.rsplit("/", 1)): row.ratio
    for row in rows
    if row.metric == "temp_bytes" and row.ratio is not None
  }
  nets = list(dict.fromkeys(net for net, _ in shares))
  modes = list(dict.fromkeys(mode for _, mode in shares))
  figure = Figure(figsize=(9, 1 + 0.8 * len(nets)), layout="constrained")
  FigureCanvasAgg(figure)
  axes = figure.add_subplot()
  height = 0.8 / max(1, len(modes))
  for i, mode in enumerate(modes):
    known = [j for j, net in enumerate(nets) if (net, mode) in shares]
    axes.barh(
      [j + i * height for j in known],
      [100 * shares[nets[j], mode] for j in known],
      height,
      label=mode,
    )
  axes.set_yticks([j + 0.4 for j in range(len(nets))], nets)
  axes.invert_yaxis()
  axes.set_xscale("log")
  axes.set_xlabel("temporaries on the device, % of plain: compiled, not run")
  axes.legend(fontsize="x-small")
  axes.grid(alpha=0.3, axis="x")
  pathlib.Path(path).parent.mkdir(parents=True, exist_ok=True)
  figure.savefig(path, dpi=150)
