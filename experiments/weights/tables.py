"""From rows to the paper's two tables and the plot."""

import os
import pathlib
from collections.abc import Mapping, Sequence

import rich.table
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from experiments.common.records import Row
from experiments.common.tables import (
  Table,
  format_gap,
  format_noise,
  index_rows,
)
from experiments.weights import paper
from experiments.weights.host_link import HOST_LINKS
from experiments.weights.rows import BASELINE
from experiments.weights.trainer import Run

Cells = dict[tuple[str, str], Row]

# What the paper calls a column, and which rows of ours add up to it.
_PIECES = {
  "host to device": ("host_to_device_ms",),
  "device to host": ("device_to_host_ms",),
  "forward, backward": ("forward_ms", "backward_ms"),
  "update": ("update_ms",),
  "norm": ("norm_ms",),
  "pack": ("pack_ms",),
  "unpack": ("unpack_ms",),
}
_COMPUTE = ("convolution_ms", "fully_connected_ms")


def profile_table(rows: Sequence[Row], link: str) -> rich.table.Table:
  """Milliseconds of a batch by what they were spent on.

  Args:
    rows: made by `make_rows`.
    link: whose emulated transfers are shown, where none were measured.
  """
  cells = _cells(rows)
  table = _table(
    f"Milliseconds a batch: {rows[0].experiment}, profiled on"
    f" {rows[0].machine}",
    ("case", *_PIECES, "norm, share"),
    "paper: VGG-A, 224 pixels, batch 64, on its machines; compare shares, not"
    f" times. * emulated: {HOST_LINKS[link].source}. The backward pass packs"
    " gradients, the update unpacks them.",
  )
  for system, case in paper.PROFILES:
    name = f"paper_{system}_{case}"
    shown = [_published(cells, name, metrics) for metrics in _PIECES.values()]
    table.add_row(name, *shown, "")
  for case in [case for case, metric in cells if metric == "pack_ratio"]:
    shown = [_ours(cells, case, metrics, link) for metrics in _PIECES.values()]
    table.add_row(case, *shown, _value(cells, case, "norm_share", "{:.2f} %"))
  return table


def _published(cells: Cells, case: str, metrics: tuple[str, ...]) -> str:
  if metrics[0] == "forward_ms":
    metrics = _COMPUTE
  value = sum(float(cells[case, m].value) for m in metrics)
  return f"{value:.2f}" if value else "-"


def _ours(cells: Cells, case: str, metrics: tuple[str, ...], link: str) -> str:
  total, mark = 0.0, ""
  for metric in metrics:
    row = cells.get((case, metric))
    if row is None:
      row, mark = cells[case, f"{metric}_{link}"], "*"
    total += float(row.value)
  return f"{total:.2f}{mark}"


def error_table(rows: Sequence[Row], link: str) -> rich.table.Table:
  """Accuracy, bytes, and time to the error threshold relative to fp32.

  Args:
    rows: made by `make_rows`.
    link: as for `profile_table`.
  """
  cells = _cells(rows)
  sizes = [
    row.metric.removeprefix("time_to_error_batch")
    for row in rows
    if row.case == "paper_x86_a2dtwp" and "to_error_batch" in row.metric
  ]
  table = _table(
    f"Time to an error, relative to fp32: {rows[0].experiment}",
    (
      "case",
      "accuracy, %",
      "to fp32",
      "sent, x",
      "back, x",
      "switches",
      "steps",
      link,
      "x86",
      "power",
    ),
    "± is the standard deviation over the seeds. never: some seed misses the"
    f" error. {link}: steps times (the step measured here and its bytes over"
    " that link, emulated unless a device was there). x86, power: of the"
    " paper as published, at batch"
    f" {' / '.join(sizes)}; of ours predicted: steps times the batch of VGG-A"
    " at batch 64 on the paper's machines, one thing after the other.",
  )
  for case in [case for case, metric in cells if metric == "test_accuracy"]:
    table.add_row(case, *_error_cells(cells, case, link))
  for case in ("a2dtwp", "best_static"):
    times = [
      " / ".join(
        f"{cells[f'paper_{s}_{case}', f'time_to_error_batch{size}'].value:.3f}"
        for size in sizes
      )
      for s in paper.SYSTEMS
    ]
    table.add_row(f"paper_{case}", *[""] * 7, *times)
  return table


def _error_cells(cells: Cells, case: str, link: str) -> list[str]:
  score = cells[case, "test_accuracy"]
  noise = "" if score.noise is None else f" ± {score.noise:.2f}"
  gap = "-"
  if score.baseline is not None:
    gap = f"{float(score.value) - score.baseline:+z.2f}"
  emulated = f"time_to_error_{link}"
  if (case, "time_to_error") in cells:
    emulated = "time_to_error"  # Measured: nothing is emulated.
  times = (emulated, *(f"predicted_{s}_time_to_error" for s in paper.SYSTEMS))
  return [
    f"{score.value:.2f}{noise}",
    gap,
    _value(cells, case, "sent_ratio", "{:.2f}"),
    _value(cells, case, "returned_ratio", "{:.2f}"),
    _value(cells, case, "switches", "{:.0f}"),
    _value(cells, case, "steps_to_error", "{:.0f}"),
    *(_ratio(cells, case, metric) for metric in times),
  ]


def prediction_table(rows: Sequence[Row], system: str) -> rich.table.Table:
  """The predicted batch of VGG-A, term by term, relative to fp32.

  Args:
    rows: made by `make_rows`.
    system: of the paper.
  """
  cells = _cells(rows)
  prefix = f"predicted_{system}_"
  metrics = [
    metric
    for case, metric in cells
    if case == BASELINE and metric.startswith(prefix) and metric.endswith("_ms")
  ]
  titles = [m.removeprefix(prefix).removesuffix("_ms") for m in metrics]
  best = paper.TIME_TO_ERROR[system, "best_static"]["vgg_a"][-1]
  table = _table(
    f"Predicted ms a batch of VGG-A, batch 64, on {paper.SYSTEMS[system]}",
    ("case", *(title.replace("_", " ") for title in titles)),
    "batch: one thing after the other. overlapped: stages beside each other."
    " In brackets: of fp32's. The paper's best static format takes"
    f" {best} of fp32's time to an error.",
  )
  for case in [case for case, metric in cells if metric == "pack_ratio"]:
    table.add_row(case, *(_with_ratio(cells[case, m]) for m in metrics))
  return table


def _with_ratio(row: Row) -> str:
  whole = "batch" in row.metric or "overlapped" in row.metric
  ratio = f" ({row.ratio:.3f})" if whole and row.ratio else ""
  return f"{row.value:.1f}{ratio}"


def _value(cells: Cells, case: str, metric: str, style: str) -> str:
  row = cells.get((case, metric))
  return "never" if row is None else style.format(row.value)


def _ratio(cells: Cells, case: str, metric: str) -> str:
  row = cells.get((case, metric))
  if row is None:
    return "never"
  return "-" if row.ratio is None else f"{row.ratio:.3f}"


def _table(
  title: str, columns: Sequence[str], caption: str
) -> rich.table.Table:
  table = rich.table.Table(title=title, caption=caption)
  first, *others = columns
  table.add_column(first, no_wrap=True)
  for column in others:
    table.add_column(column, justify="right")
  return table


def _cells(rows: Sequence[Row]) -> Cells:
  return {(row.case, row.metric): row for row in rows}


def save_plot(
  runs: Sequence[Run],
  bits: Mapping[str, Sequence[int]],
  path: str | os.PathLike,
) -> None:
  """Draws the error of every case and the precision of every layer.

  Args:
    runs: of the job.
    bits: of every level, by adaptive case.
    path: of the image; its suffix chooses the format.
  """
  figure = Figure(figsize=(6 + 5 * len(bits), 4.5), layout="constrained")
  FigureCanvasAgg(figure)
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
  first.legend(fontsize="small")
  for axes, (case, ladder) in zip(others, bits.items(), strict=True):
    run = next(run for run in runs if run.case == case)
    _draw_trajectory(axes, run, ladder)
  pathlib.Path(path).parent.mkdir(parents=True, exist_ok=True)
  figure.savefig(path, dpi=150)


def _draw_trajectory(axes: Axes, run: Run, ladder: Sequence[int]) -> None:
  for i, group in enumerate(run.groups):
    own = [(step, level) for step, g, level in run.switches if g == i]
    steps = [step for step, _ in own] + [run.steps]
    # Lines that coincide are told apart by a little, on a logarithmic axis.
    bits = [
      ladder[level] * 1.01 ** (i - len(run.groups) / 2) for _, level in own
    ]
    axes.step(steps, [*bits, bits[-1]], where="post", label=group)
  axes.set_yscale("log", base=2)
  axes.set_ylim(ladder[0] / 2, ladder[-1] * 2)
  axes.set_yticks(ladder, map(str, ladder))
  axes.minorticks_off()
  axes.set_xlabel("steps")
  axes.set_ylabel("bits of a weight")
  axes.set_title(f"{run.case}, seed {run.seed}")
  axes.grid(alpha=0.3)
  axes.legend(fontsize="x-small", ncols=2)


def summary_table(rows: Sequence[Row]) -> Table:
  """Returns accuracy, bytes and predicted times, a line for each case.

  Args:
    rows: made by `rows.make_rows`.
  """
  found = index_rows(rows)
  lines = []
  for row in [row for row in rows if row.metric == "test_accuracy"]:
    steps = found.get((row.case, "steps_to_error"))
    line = [
      row.case,
      format_noise(row),
      format_gap(row),
      f"{found[row.case, 'sent_ratio'].value:.2f}",
      f"{found[row.case, 'returned_ratio'].value:.2f}",
      "never" if steps is None else f"{steps.value:.0f}",
    ]
    for metric in ("batch_ms", "time_to_error"):
      cell = found.get((row.case, f"predicted_x86_{metric}"))
      line.append("never" if cell is None else f"{cell.ratio:.3f}")
    lines.append(line)
  header = (
    "weights and gradients",
    "test accuracy, %",
    "to fp32, points",
    "fewer bytes to the device",
    "and back",
    "steps to error",
    "batch of VGG-A, predicted",
    "time to error, predicted",
  )
  return Table(header, lines)
