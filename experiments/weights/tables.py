"""Tables of the weights experiment: the paper's two, predictions, a summary."""

from collections.abc import Sequence

from experiments.common import records, tables
from experiments.weights import host_link, paper
from experiments.weights.rows import BASELINE

Cells = dict[tuple[str, str], records.Row]

# Columns of the paper's table, and the rows of ours that add up to each.
_PARTS = {
  "host to device": ("host_to_device_ms",),
  "device to host": ("device_to_host_ms",),
  "forward, backward": ("forward_ms", "backward_ms"),
  "update": ("update_ms",),
  "norm": ("norm_ms",),
  "pack": ("pack_ms",),
  "unpack": ("unpack_ms",),
}
_COMPUTE = ("convolution_ms", "fully_connected_ms")


def profile_table(rows: Sequence[records.Row], link: str) -> tables.Table:
  """Returns the milliseconds of a batch by parts, a line for each case."""
  cells = tables.index_rows(rows)
  lines = []
  for system, case in paper.PROFILES:
    name = f"paper_{system}_{case}"
    parts = [_paper_cell(cells, name, metrics) for metrics in _PARTS.values()]
    lines.append([name, *parts, ""])
  for case in _cases_with(cells, "pack_ratio"):
    parts = [_own_cell(cells, case, m, link) for m in _PARTS.values()]
    share = _value_cell(cells, case, "norm_share", "{:.2f} %")
    lines.append([case, *parts, share])
  return tables.Table(
    ("case", *_PARTS, "norm, share"),
    lines,
    title=f"Milliseconds per batch: {rows[0].experiment}, profiled on"
    f" {rows[0].machine}",
    caption="paper: VGG-A, 224 pixels, batch 64, on its machines; compare"
    f" shares, not times. * emulated: {host_link.HOST_LINKS[link].source}. The "
    "backward"
    " pass packs gradients, the update unpacks them.",
  )


def _paper_cell(cells: Cells, case: str, metrics: tuple[str, ...]) -> str:
  if metrics[0] == "forward_ms":
    metrics = _COMPUTE
  value = sum(float(cells[case, m].value) for m in metrics)
  return f"{value:.2f}" if value else "-"


def _own_cell(
  cells: Cells, case: str, metrics: tuple[str, ...], link: str
) -> str:
  total, mark = 0.0, ""
  for metric in metrics:
    row = cells.get((case, metric))
    if row is None:
      row, mark = cells[case, f"{metric}_{link}"], "*"
    total += float(row.value)
  return f"{total:.2f}{mark}"


def error_table(rows: Sequence[records.Row], link: str) -> tables.Table:
  """Returns accuracy, bytes and time to the error threshold by case."""
  cells = tables.index_rows(rows)
  sizes = [
    row.metric.removeprefix("time_to_error_batch")
    for row in rows
    if row.case == "paper_x86_a2dtwp" and "to_error_batch" in row.metric
  ]
  lines = [
    [case, *_error_cells(cells, case, link)]
    for case in _cases_with(cells, "test_accuracy")
  ]
  for case in ("a2dtwp", "best_static"):
    times = [
      " / ".join(
        f"{cells[f'paper_{s}_{case}', f'time_to_error_batch{size}'].value:.3f}"
        for size in sizes
      )
      for s in paper.SYSTEMS
    ]
    lines.append([f"paper_{case}", *[""] * 7, *times])
  header = (
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
  )
  return tables.Table(
    header,
    lines,
    title=f"Time to an error, relative to fp32: {rows[0].experiment}",
    caption="± is the standard deviation over the seeds. never: some seed"
    f" misses the error. {link}: steps times (the step measured here and its"
    " bytes over that link, emulated unless a device was there). x86, power: of"
    f" the paper as published, at batch {' / '.join(sizes)}; of ours predicted:"
    " steps times the batch of VGG-A at batch 64 on the paper's machines, one"
    " part after the other.",
  )


def _error_cells(cells: Cells, case: str, link: str) -> list[str]:
  score = cells[case, "test_accuracy"]
  own_time = f"time_to_error_{link}"
  if (case, "time_to_error") in cells:
    own_time = "time_to_error"  # Measured on a device: nothing is emulated.
  times = (own_time, *(f"predicted_{s}_time_to_error" for s in paper.SYSTEMS))
  return [
    tables.format_noise(score),
    tables.format_gap(score),
    _value_cell(cells, case, "sent_ratio", "{:.2f}"),
    _value_cell(cells, case, "returned_ratio", "{:.2f}"),
    _value_cell(cells, case, "switches", "{:.0f}"),
    _value_cell(cells, case, "steps_to_error", "{:.0f}"),
    *(_ratio_cell(cells, case, metric) for metric in times),
  ]


def prediction_table(rows: Sequence[records.Row], system: str) -> tables.Table:
  """Returns the predicted batch of VGG-A term by term, with ratios to fp32."""
  cells = tables.index_rows(rows)
  prefix = f"predicted_{system}_"
  metrics = [
    metric
    for case, metric in cells
    if case == BASELINE and metric.startswith(prefix) and metric.endswith("_ms")
  ]
  titles = [m.removeprefix(prefix).removesuffix("_ms") for m in metrics]
  best = paper.TIME_TO_ERROR[system, "best_static"]["vgg_a"][-1]
  return tables.Table(
    ("case", *(title.replace("_", " ") for title in titles)),
    [
      [case, *(_predicted_cell(cells[case, m]) for m in metrics)]
      for case in _cases_with(cells, "pack_ratio")
    ],
    title="Predicted ms per batch of VGG-A, batch 64, on"
    f" {paper.SYSTEMS[system]}",
    caption="batch: all parts in sequence. overlapped: stages beside each"
    " other. In brackets: relative to fp32. The paper's best static format"
    f" takes {best} of fp32's time to an error.",
  )


def _predicted_cell(row: records.Row) -> str:
  is_total = "batch" in row.metric or "overlapped" in row.metric
  ratio = f" ({row.ratio:.3f})" if is_total and row.ratio else ""
  return f"{row.value:.1f}{ratio}"


def _value_cell(cells: Cells, case: str, metric: str, style: str) -> str:
  row = cells.get((case, metric))
  return "never" if row is None else style.format(row.value)


def _ratio_cell(cells: Cells, case: str, metric: str) -> str:
  row = cells.get((case, metric))
  if row is None:
    return "never"
  return "-" if row.ratio is None else f"{row.ratio:.3f}"


def _cases_with(cells: Cells, metric: str) -> list[str]:
  return [case for case, name in cells if name == metric]


def summary_table(rows: Sequence[records.Row]) -> tables.Table:
  """Returns accuracy, bytes and predicted times, a line for each case."""
  found = tables.index_rows(rows)
  lines = []
  for row in [row for row in rows if row.metric == "test_accuracy"]:
    steps = found.get((row.case, "steps_to_error"))
    line = [
      row.case,
      tables.format_noise(row),
      tables.format_gap(row),
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
  return tables.Table(header, lines)
