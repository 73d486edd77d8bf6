"""Plot of residual rows: device memory of each mode, relative to plain."""

import os
from collections.abc import Sequence

from experiments.common import figures, records

_MARKS = "osD^v<>pPXhH*d8"


def save_plot(
  rows: Sequence[records.Row], path: str | os.PathLike[str]
) -> None:
  """Draws the temporaries of each mode relative to plain, by network."""
  shares = {
    tuple(row.case.rsplit("/", 1)): row.ratio
    for row in rows
    if row.metric == "temp_bytes" and row.ratio is not None
  }
  nets = list(dict.fromkeys(net for net, _ in shares))
  modes = list(dict.fromkeys(mode for _, mode in shares))
  figure = figures.make_figure(9, 1 + 0.8 * len(nets))
  axes = figure.add_subplot()
  height = 0.6 / max(1, len(modes))
  for i, mode in enumerate(modes):
    known = [j for j, net in enumerate(nets) if (net, mode) in shares]
    # Points: the length of a bar means nothing on a logarithmic axis.
    axes.plot(
      [100 * shares[nets[j], mode] for j in known],
      [j + (i + 0.5) * height - 0.3 for j in known],
      _MARKS[i % len(_MARKS)],
      color=f"C{i % 10}",
      markersize=5,
      label=mode.replace("_", " "),
    )
  for j in range(1, len(nets)):
    axes.axhline(j - 0.5, color="lightgray", linewidth=0.8)
  axes.set_yticks(range(len(nets)), nets)
  axes.invert_yaxis()
  axes.set_xscale("log")
  axes.set_xlabel("temporaries on the device, % of plain (logarithmic)")
  axes.set_title("Device memory by mode: compiled, not run")
  figure.legend(loc="outside right upper", fontsize="small")
  axes.grid(alpha=0.3, axis="x")
  figures.save_figure(figure, path)
