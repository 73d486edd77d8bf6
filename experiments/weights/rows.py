"""From runs, profiles and predictions to rows, the paper's among them.

Rows of what is emulated or predicted say so in their unit; what the paper
published has the paper in the place of the machine.
"""

import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import jax

from experiments.common import records
from experiments.common.records import Row
from experiments.weights import paper, predict
from experiments.weights.cases import get_case
from experiments.weights.host_link import HOST_LINKS, emulated
from experiments.weights.predict import Share, Touched
from experiments.weights.profile import BITPACK, Profile
from experiments.weights.trainer import Run
from jaxmotion import codecs

BASELINE = "fp32"
PREDICTED = "ms (predicted)"
_MEASURED = {
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
    unit: of it.
    noise: over seeds or rounds, if there are several.
  """

  value: float
  unit: str
  noise: float | None = None


Found = dict[str, Measured]


def make_rows(
  experiment: str, cases: Mapping[str, Found], facts: Mapping[str, Found]
) -> list[Row]:
  """Rows of what was found; ratios to `fp32`, where it has the metric.

  Args:
    experiment: name in the rows.
    cases: measurements by case and metric.
    facts: published ones, by case and metric.
  """
  base = cases.get(BASELINE, {})
  stamp = records.describe_machine(), jax.__version__
  rows = []
  for case, found in cases.items():
    for metric, (value, unit, noise) in found.items():
      baseline = base[metric].value if metric in base else None
      ratio = value / baseline if baseline else None
      named = experiment, case, metric
      rows.append(Row(*named, value, unit, baseline, ratio, noise, *stamp))
  for case, found in facts.items():
    for metric, (value, unit, _) in found.items():
      named = experiment, case, metric
      source = paper.SOURCE, "not JAX"
      rows.append(Row(*named, value, unit, None, None, None, *source))
  return rows


def trained(runs: Iterable[Run], threshold: float) -> dict[str, Found]:
  """What runs have shown, by case, over their seeds.

  A case that misses the threshold with any seed has no `steps_to_error`.

  Args:
    runs: of the job.
    threshold: error on held-out data, in per cent.
  """
  groups: dict[str, list[Run]] = {}
  for run in runs:
    groups.setdefault(run.case, []).append(run)
  return {case: _over_seeds(group, threshold) for case, group in groups.items()}


def _over_seeds(runs: list[Run], threshold: float) -> Found:
  accuracies = [100 - run.error for run in runs]
  sent = statistics.fmean(run.sent_bytes for run in runs)
  returned = statistics.fmean(run.returned_bytes for run in runs)
  plain = runs[0].plain_bytes
  times = [run.step_ms for run in runs]
  found = {
    "test_accuracy": Measured(
      statistics.fmean(accuracies), "%", _spread(accuracies)
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
    "step_ms": Measured(statistics.median(times), "ms", _spread(times)),
  }
  steps = [steps_to_error(run, threshold) for run in runs]
  reached = [s for s in steps if s is not None]
  if len(reached) == len(runs):
    found["steps_to_error"] = Measured(
      statistics.fmean(reached), "steps", _spread(reached)
    )
  return found


def steps_to_error(run: Run, threshold: float) -> int | None:
  """The first evaluation at or below the threshold, in steps; None if none."""
  return next((done for done, e in run.curve if e <= threshold), None)


def profiled(profile: Profile, *, on_host: bool) -> Found:
  """What a step of a case takes.

  Args:
    profile: of the case.
    on_host: whether the host computed, too: transfers are then emulated.
  """
  found = {
    metric: Measured(profile.ms[piece], "ms")
    for metric, piece in _MEASURED.items()
  }
  found["profile_step_ms"] = Measured(profile.step_ms, "ms", profile.noise_ms)
  found["norm_share"] = Measured(profile.norm_share, "% of the step")
  found["pack_ratio"] = Measured(profile.pack_ratio, f"x {BITPACK}")
  found["profile_sent_bytes"] = Measured(profile.sent_bytes, "bytes/step")
  found["profile_returned_bytes"] = Measured(
    profile.returned_bytes, "bytes/step"
  )
  if not on_host:
    found["host_to_device_ms"] = Measured(profile.ms["send"], "ms")
    found["device_to_host_ms"] = Measured(profile.ms["return"], "ms")
    return found
  for name, link in HOST_LINKS.items():
    unit = emulated("ms", name)
    down = link.ms(profile.sent_bytes, profile.sends)
    up = link.ms(profile.returned_bytes, profile.returns)
    found[f"host_to_device_ms_{name}"] = Measured(down, unit)
    found[f"device_to_host_ms_{name}"] = Measured(up, unit)
  return found


def timed_to_error(case: Found, profile: Profile, *, on_host: bool) -> Found:
  """Time to the error threshold; empty for a case that misses it.

  Args:
    case: what `trained` and `predicted` found of it.
    profile: of the case, for the number of its transfers.
    on_host: whether the host computed, too: transfers are then emulated.
  """
  if "steps_to_error" not in case:
    return {}
  steps, step_ms = case["steps_to_error"].value, case["step_ms"].value
  found = {}
  if not on_host:
    found["time_to_error"] = Measured(steps * step_ms / 1e3, "s")
  for name, link in HOST_LINKS.items() if on_host else ():
    moved_ms = link.ms(case["sent_bytes"].value, profile.sends)
    moved_ms += link.ms(case["returned_bytes"].value, profile.returns)
    seconds = steps * (step_ms + moved_ms) / 1e3
    found[f"time_to_error_{name}"] = Measured(seconds, emulated("s", name))
  for system in paper.SYSTEMS:
    batch_ms = case[f"predicted_{system}_batch_ms"].value
    found[f"predicted_{system}_time_to_error"] = Measured(
      steps * batch_ms / 1e3, "s (predicted)"
    )
  return found


def touched(found: Found, profile: Profile) -> Touched:
  """Bytes a weight that a case moves and touches, for a prediction.

  Work on the host costs what it was measured to, against truncation to one
  byte, which is what Bitpack does and touches 5 bytes a weight. The rest is
  counted: unpacking reads a payload (and what the device holds, with delta) and
  writes floats; packing gradients reads them twice, for the scale and for the
  codes (and reads and writes the error memory, with feedback); the host reads
  the payloads of all GPUs and writes their sum. The last overstates what is
  added: for fp32 the same sum, of four times the bytes, is among the times that
  the paper measured.

  Args:
    found: what `trained` found of the case: the bytes that moved.
    profile: of the case.
  """
  moves = get_case(profile.case)
  down = 4 / found["sent_ratio"].value
  up = 4 / found["returned_ratio"].value
  plain = Touched(down, up)
  if moves.weights != (codecs.identity(),):
    held = 4 if moves.delta else 0
    plain = plain._replace(pack=5 * profile.pack_ratio, unpack=down + held + 4)
  if moves.control:
    plain = plain._replace(norm=5 * profile.norm_ratio)
  if moves.grads != codecs.identity():
    error = 8 if isinstance(moves.grads, codecs.feedback) else 0
    plain = plain._replace(
      grad_pack=8 + up + error, grad_unpack=paper.GPUS * up + 4
    )
  return plain


def predicted(
  found: Found, profile: Profile, weights: int, shares: Sequence[Share]
) -> Found:
  """What the paper's machines would take for a case; every term is a row.

  Args:
    found: what `trained` found of the case.
    profile: of the case.
    weights: of VGG-A.
    shares: of its stages.
  """
  moves = touched(found, profile)
  terms: Found = {}
  for system in paper.SYSTEMS:
    batch = predict.predict(system, weights, moves)
    named = batch._asdict() | {
      "batch": sum(batch),
      "overlapped": predict.overlapped_ms(batch, shares),
    }
    for term, ms in named.items():
      terms[f"predicted_{system}_{term}_ms"] = Measured(ms, PREDICTED)
  return terms


def published(network: str) -> dict[str, Found]:
  """What the paper has of a network, and its profile of VGG-A."""
  found: dict[str, Found] = {}
  for (system, case), profile in paper.PROFILES.items():
    found[f"paper_{system}_{case}"] = {
      f"{piece}_ms": Measured(ms, "ms")
      for piece, ms in profile._asdict().items()
    }
  for (system, case), networks in paper.TIME_TO_ERROR.items():
    times = found.setdefault(f"paper_{system}_{case}", {})
    sizes = zip(paper.BATCHES[network], networks[network], strict=True)
    for size, ratio in sizes:
      times[f"time_to_error_batch{size}"] = Measured(ratio, "of fp32")
  return found


def _spread(values: Sequence[float]) -> float | None:
  return statistics.stdev(values) if len(values) > 1 else None
