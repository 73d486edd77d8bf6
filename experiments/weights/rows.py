"""Rows of the weights experiment: measured, predicted and published.

The unit of a row says if its value is emulated or predicted. Rows of published
figures name the paper in the place of the machine.
"""

import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import jax

from experiments.common import records
from experiments.weights import host_link, paper, predict, trainer
from experiments.weights.cases import get_case
from experiments.weights.profile import BITPACK, Profile
from jaxmotion import codecs

BASELINE = "fp32"
PREDICTED = "ms (predicted)"
_PROFILED_PARTS = {
  "pack_ms": "pack",
  "unpack_ms": "unpack",
  "forward_ms": "forward",
  "backward_ms": "backward",
  "update_ms": "update",
  "norm_ms": "norm",
}


class Measured(NamedTuple):
  """A measurement of one case.

  Attributes:
    value: the measurement.
    unit: unit of the value.
    noise: standard deviation over seeds or rounds, if there are several.
  """

  value: float
  unit: str
  noise: float | None = None


Metrics = dict[str, Measured]
"""Measurements of one case by the name of the metric."""


def make_rows(
  experiment: str, cases: Mapping[str, Metrics], network: str
) -> list[records.Row]:
  """Returns rows with ratios to `fp32`, then those of the paper."""
  base = cases.get(BASELINE, {})
  stamp = records.describe_machine(), jax.__version__
  rows = []
  for case, metrics in cases.items():
    for metric, (value, unit, noise) in metrics.items():
      baseline = base[metric].value if metric in base else None
      ratio = value / baseline if baseline else None
      key = experiment, case, metric
      rows.append(
        records.Row(*key, value, unit, baseline, ratio, noise, *stamp)
      )
  for case, metrics in paper_metrics(network).items():
    for metric, (value, unit, _) in metrics.items():
      key = experiment, case, metric
      source = paper.SOURCE, "not JAX"
      rows.append(records.Row(*key, value, unit, None, None, None, *source))
  return rows


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
  accuracies = [100 - run.error for run in runs]
  sent = statistics.fmean(run.sent_bytes for run in runs)
  returned = statistics.fmean(run.returned_bytes for run in runs)
  plain = runs[0].plain_bytes
  times = [run.step_ms for run in runs]
  metrics = {
    "test_accuracy": Measured(
      statistics.fmean(accuracies), "%", _deviation(accuracies)
    ),
    "loss": Measured(statistics.fmean(run.loss for run in runs), "nats"),
    "sent_bytes": Measured(sent, "bytes/step"),
    "returned_bytes": Measured(returned, "bytes/step"),
    "sent_ratio": Measured(plain / sent, "x"),
    "returned_ratio": Measured(plain / returned, "x"),
    "weight_error": Measured(max(run.weight_error for run in runs), "x"),
    "switches": Measured(
      statistics.fmean(len(r.switches) - len(r.groups) for r in runs), "a run"
    ),
    "step_ms": Measured(statistics.median(times), "ms", _deviation(times)),
  }
  steps = [steps_to_error(run, threshold) for run in runs]
  reached = [s for s in steps if s is not None]
  if len(reached) == len(runs):
    metrics["steps_to_error"] = Measured(
      statistics.fmean(reached), "steps", _deviation(reached)
    )
  return metrics


def steps_to_error(run: trainer.Run, threshold: float) -> int | None:
  """Returns the steps until the first evaluation at or below the threshold."""
  return next((done for done, e in run.curve if e <= threshold), None)


def profiled_metrics(profile: Profile, *, on_host: bool) -> Metrics:
  """Returns times and bytes of a case's step by its parts."""
  metrics = {
    metric: Measured(profile.ms[part], "ms")
    for metric, part in _PROFILED_PARTS.items()
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
  for name, link in host_link.HOST_LINKS.items():
    unit = host_link.emulated_unit("ms", name)
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
  for name, link in host_link.HOST_LINKS.items() if on_host else ():
    moved_ms = link.emulate_ms(case["sent_bytes"].value, profile.sends)
    moved_ms += link.emulate_ms(case["returned_bytes"].value, profile.returns)
    seconds = steps * (step_ms + moved_ms) / 1e3
    unit = host_link.emulated_unit("s", name)
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


def _deviation(values: Sequence[float]) -> float | None:
  return statistics.stdev(values) if len(values) > 1 else None
