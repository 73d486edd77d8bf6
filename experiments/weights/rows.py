"""Rows of the weights experiment: measured, predicted and published.

The unit of a row says if its value is emulated or predicted. Rows of published
figures name the paper in the place of the machine.
"""

import statistics
from collections.abc import Iterable, Mapping, Sequence

from experiments.common import records, tables
from experiments.weights import paper, predict, trainer
from experiments.weights.cases import get_case
from experiments.weights.profile import BITPACK, Profile
from jaxmotion import codecs

BASELINE = "fp32"
PREDICTED = "ms (predicted)"
_PROFILED_PARTS = "pack", "unpack", "forward", "backward", "update", "norm"

Measured = records.Measured
Metrics = dict[str, Measured]
"""Measurements of one case by the name of the metric."""


def make_rows(
  experiment: str, cases: Mapping[str, Metrics], network: str
) -> list[records.Row]:
  """Returns rows with ratios to `fp32`, then those of the paper."""
  ours = records.make_rows(experiment, cases, cases.get(BASELINE, {}))
  return ours + records.make_rows(
    experiment, paper_metrics(network), machine=paper.SOURCE, version="not JAX"
  )


def summarize_cases(
  runs: Iterable[trainer.Run],
  profiles: Iterable[Profile],
  threshold: float,
  weights: int,
  shares: Sequence[predict.StageShare],
  *,
  on_host: bool,
) -> dict[str, Metrics]:
  """Returns all metrics of all cases: trained, profiled and predicted."""
  cases = trained_metrics(runs, threshold)
  for profile in profiles:
    case = cases[profile.case]
    case |= profiled_metrics(profile, on_host=on_host)
    case |= predicted_metrics(case, profile, weights, shares)
    case |= error_times(case, profile, on_host=on_host)
  return cases


def trained_metrics(
  runs: Iterable[trainer.Run], threshold: float
) -> dict[str, Metrics]:
  """Returns accuracy, bytes and times by case, over the seeds."""
  # A case that misses the threshold with any seed has no `steps_to_error`.
  groups: dict[str, list[trainer.Run]] = {}
  for run in runs:
    groups.setdefault(run.case, []).append(run)
  return {
    case: _average_seeds(group, threshold) for case, group in groups.items()
  }


def _average_seeds(runs: list[trainer.Run], threshold: float) -> Metrics:
  """Returns the metrics of one case, averaged over its seeds."""
  accuracies = [100 - run.error for run in runs]
  sent = statistics.fmean(run.sent_bytes for run in runs)
  returned = statistics.fmean(run.returned_bytes for run in runs)
  plain = runs[0].plain_bytes
  times = [run.step_ms for run in runs]
  metrics = {
    "test_accuracy": records.average_repeats(accuracies, "%"),
    "loss": Measured(statistics.fmean(run.loss for run in runs), "nats"),
    "sent_bytes": Measured(sent, "bytes/step"),
    "returned_bytes": Measured(returned, "bytes/step"),
    "sent_ratio": Measured(plain / sent, "x"),
    "returned_ratio": Measured(plain / returned, "x"),
    "weight_error": Measured(max(run.weight_error for run in runs), "x"),
    "switches": Measured(
      statistics.fmean(len(r.switches) - len(r.groups) for r in runs), "a run"
    ),
    "step_ms": Measured(
      statistics.median(times), "ms", records.find_spread(times)
    ),
  }
  steps = [steps_to_error(run, threshold) for run in runs]
  reached = [s for s in steps if s is not None]
  if len(reached) == len(runs):
    metrics["steps_to_error"] = records.average_repeats(reached, "steps")
  return metrics


def steps_to_error(run: trainer.Run, threshold: float) -> int | None:
  """Returns the steps until the first evaluation at or below the threshold."""
  return next((done for done, e in run.curve if e <= threshold), None)


def profiled_metrics(profile: Profile, *, on_host: bool) -> Metrics:
  """Returns times and bytes of a case's step by its parts."""
  metrics = {
    f"{part}_ms": Measured(profile.ms[part], "ms") for part in _PROFILED_PARTS
  }
  metrics["profile_step_ms"] = Measured(profile.step_ms, "ms", profile.noise_ms)
  metrics["norm_share"] = Measured(profile.norm_share, "% of the step")
  metrics["pack_ratio"] = Measured(profile.pack_ratio, f"x {BITPACK}")
  metrics["profile_sent_bytes"] = Measured(profile.sent_bytes, "bytes/step")
  metrics["profile_returned_bytes"] = Measured(
    profile.returned_bytes, "bytes/step"
  )
  if not on_host:
    metrics["host_to_device_ms"] = Measured(profile.ms["send"], "ms")
    metrics["device_to_host_ms"] = Measured(profile.ms["return"], "ms")
    return metrics
  for name, link in predict.HOST_LINKS.items():
    unit = predict.emulated_unit("ms", name)
    down = link.emulate_ms(profile.sent_bytes, profile.sends)
    up = link.emulate_ms(profile.returned_bytes, profile.returns)
    metrics[f"host_to_device_ms_{name}"] = Measured(down, unit)
    metrics[f"device_to_host_ms_{name}"] = Measured(up, unit)
  return metrics


def error_times(case: Metrics, profile: Profile, *, on_host: bool) -> Metrics:
  """Returns times to the error threshold; none for a case that misses it."""
  if "steps_to_error" not in case:
    return {}
  steps, step_ms = case["steps_to_error"].value, case["step_ms"].value
  metrics = {}
  if not on_host:
    metrics["time_to_error"] = Measured(steps * step_ms / 1e3, "s")
  for name, link in predict.HOST_LINKS.items() if on_host else ():
    moved_ms = link.emulate_ms(case["sent_bytes"].value, profile.sends)
    moved_ms += link.emulate_ms(case["returned_bytes"].value, profile.returns)
    seconds = steps * (step_ms + moved_ms) / 1e3
    unit = predict.emulated_unit("s", name)
    metrics[f"time_to_error_{name}"] = Measured(seconds, unit)
  for system in paper.SYSTEMS:
    batch_ms = case[f"predicted_{system}_batch_ms"].value
    metrics[f"predicted_{system}_time_to_error"] = Measured(
      steps * batch_ms / 1e3, "s (predicted)"
    )
  return metrics


def count_touched_bytes(
  metrics: Metrics, profile: Profile
) -> predict.TouchedBytes:
  """Returns the bytes per weight that a case moves and that coding touches."""
  # Work on the host is measured relative to truncation to one byte, which is
  # what Bitpack does; that touches 5 bytes per weight. The rest is counted.
  # * Unpacking reads a payload (and, with delta, the weights on the device) and
  #   writes floats.
  # * Packing a gradient reads it twice, for the scale and for the codes (and,
  #   with feedback, reads and writes the error memory).
  # * The host reads the payloads of all GPUs and writes their sum. That
  #   overstates the added bytes: for fp32, the times that the paper measured
  #   contain the same sum, of four times the bytes.
  case = get_case(profile.case)
  down = 4 / metrics["sent_ratio"].value
  up = 4 / metrics["returned_ratio"].value
  touched = predict.TouchedBytes(down, up)
  if case.weights != (codecs.identity(),):
    reference = 4 if case.delta else 0
    touched = touched._replace(
      pack=5 * profile.pack_ratio, unpack=down + reference + 4
    )
  if case.control:
    touched = touched._replace(norm=5 * profile.norm_ratio)
  if case.grads != codecs.identity():
    error = 8 if isinstance(case.grads, codecs.feedback) else 0
    touched = touched._replace(
      grad_pack=8 + up + error, grad_unpack=paper.GPUS * up + 4
    )
  return touched


def predicted_metrics(
  metrics: Metrics,
  profile: Profile,
  weights: int,
  shares: Sequence[predict.StageShare],
) -> Metrics:
  """Returns predicted times on the paper's machines, a metric for each term."""
  touched = count_touched_bytes(metrics, profile)
  terms: Metrics = {}
  for system in paper.SYSTEMS:
    batch = predict.predict_batch(system, weights, touched)
    times = batch._asdict() | {
      "batch": sum(batch),
      "overlapped": predict.overlapped_ms(batch, shares),
    }
    for term, ms in times.items():
      terms[f"predicted_{system}_{term}_ms"] = Measured(ms, PREDICTED)
  return terms


def paper_metrics(network: str) -> dict[str, Metrics]:
  """Returns the paper's profile of VGG-A and its times of a network."""
  cases: dict[str, Metrics] = {}
  for (system, case), profile in paper.PROFILES.items():
    cases[f"paper_{system}_{case}"] = {
      f"{part}_ms": Measured(ms, "ms") for part, ms in profile._asdict().items()
    }
  for (system, case), networks in paper.TIME_TO_ERROR.items():
    times = cases.setdefault(f"paper_{system}_{case}", {})
    sizes = zip(paper.BATCHES[network], networks[network], strict=True)
    for size, ratio in sizes:
      times[f"time_to_error_batch{size}"] = Measured(ratio, "of fp32")
  return cases


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
    f" shares, not times. * emulated: {predict.HOST_LINKS[link].source}. The"
    " backward pass packs gradients, the update unpacks them.",
  )


def _paper_cell(cells: Cells, case: str, metrics: tuple[str, ...]) -> str:
  if metrics[0] == "forward_ms":
    metrics = _COMPUTE
  value = sum(float(cells[case, m].value) for m in metrics)
  return f"{value:.2f}" if value else "-"


def _own_cell(
  cells: Cells, case: str, metrics: tuple[str, ...], link: str
) -> str:
  """Returns the milliseconds of a part; a star marks emulated ones."""
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
    *("case", "accuracy, %", "to fp32", "sent, x", "back, x", "switches"),
    *("steps", link, "x86", "power"),
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
  """Returns a case's line of `error_table`."""
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
    *("weights and gradients", "test accuracy, %", "to fp32, points"),
    *("fewer bytes to the device", "and back", "steps to error"),
    *("batch of VGG-A, predicted", "time to error, predicted"),
  )
  return tables.Table(header, lines)
