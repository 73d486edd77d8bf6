"""Plot of cases timed on hosts: step times and what the link allows."""

import os
from collections.abc import Sequence

from matplotlib.ticker import LogLocator, NullFormatter

from experiments.common import figures
from experiments.common.records import Row

_ALLOWED = "what the link allows"
_LABELS = ("jaxmotion", "PyTorch DDP", _ALLOWED)


def save_plot(rows: Sequence[Row], path: str | os.PathLike[str]) -> None:
  """Draws the step time of every case, and what the link allows."""
  values = {(row.case, row.metric): float(row.value) for row in rows}
  cases = list(dict.fromkeys(row.case for row in rows))[::-1]
  figure = figures.make_figure(7, 0.35 * len(cases) + 1.5)
  axes = figure.add_subplot()
  for i, case in enumerate(cases):
    step_ms = values[case, "step_ms"]
    is_peer = case.startswith("torch")
    color = "tab:gray" if is_peer else "tab:blue"
    axes.plot(step_ms, i, "o", color=color, label=_LABELS[is_peer])
    right_ms = step_ms
    if (case, "ideal_ratio") in values:
      ideal = step_ms / values[case, "ideal_ratio"]
      axes.plot(ideal, i, "|", color="black", markersize=12, label=_ALLOWED)
      right_ms = max(right_ms, ideal)
    axes.annotate(
      f"{step_ms:.0f}",
      (right_ms, i),  # Behind both marks, which would hide it.
      xytext=(7, 0),
      textcoords="offset points",
      va="center",
      fontsize="small",
    )
  axes.set_yticks(range(len(cases)), cases)
  axes.set_xscale("log")
  axes.margins(x=0.1)
  axes.grid(alpha=0.3)
  axes.set_xlabel("step, ms (logarithmic)")
  axes.set_title("Time of a step by exchange")
  axes.xaxis.set_major_formatter("{x:g}")
  axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
  axes.xaxis.set_minor_formatter(NullFormatter())
  handles, labels = axes.get_legend_handles_labels()
  found = dict(zip(labels, handles, strict=True))
  known = {name: found[name] for name in _LABELS if name in found}
  figure.legend(
    known.values(), known, loc="outside lower center", ncols=len(known)
  )
  figures.save_figure(figure, path)
