"""Tables and plots of rows of `points`."""

import os
import pathlib
from collections.abc import Sequence

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from rich.table import Table

from experiments.common.records import Row

_GIB = 2**30
_Found = dict[tuple[str, str], Row]


def table(rows: Sequence[Row]) -> Table:
  """A line for each network, batch and mode."""
  found = _found(rows)
  machines = {r.machine for r in rows if r.metric == "temp_bytes"}
  made = Table(
    title="; ".join(sorted(machines)),
    caption="in between, arguments, results: GiB on the device; of plain: what"
    " is in between; FLOPs and step by the performance model over plain's",
  )
  made.add_column("network, batch, mode", no_wrap=True)
  for name in (
    "in between",
    "of plain",
    "on the host",
    "arguments",
    "results",
    "FLOPs",
    "step by model",
    "step",
    "compiled, s",
  ):
    made.add_column(name, justify="right")
  for case in dict.fromkeys(row.case for row in rows):
    if (case, "temp_bytes") in found:
      made.add_row(case, *_cells(found, case))
  return made


def save_plot(rows: Sequence[Row], path: str | os.PathLike[str]) -> None:
  """Draws what is in between in each mode, of plain, by network.

  Args:
    rows: with `temp_bytes`.
    path: of the image; its suffix chooses the format.
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
  axes.set_xlabel("device memory in between, % of plain: compiled, not run")
  axes.legend(fontsize="x-small")
  axes.grid(alpha=0.3, axis="x")
  pathlib.Path(path).parent.mkdir(parents=True, exist_ok=True)
  figure.savefig(path, dpi=150)


def _found(rows: Sequence[Row]) -> _Found:
  return {(row.case, row.metric): row for row in rows}


def _cells(found: _Found, case: str) -> list[str]:
  temp = found[case, "temp_bytes"]
  if isinstance(temp.value, str):
    return [temp.value]
  step = found[case, "step_ms"].value
  return [
    _gib(temp),
    _times(temp),
    *(
      _gib(found[case, metric])
      for metric in ("host_temp_bytes", "argument_bytes", "result_bytes")
    ),
    _times(found[case, "flops"]),
    _times(found[case, "step_ms_predicted"]),
    "not measured" if isinstance(step, str) else f"{step:.1f} ms",
    f"{found[case, 'compile_s'].value:.0f}",
  ]


def _gib(row: Row) -> str:
  return f"{float(row.value) / _GIB:.2f}"


def _times(row: Row) -> str:
  return "-" if row.ratio is None else f"{row.ratio:.3f}"
