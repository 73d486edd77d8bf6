"""Rows of finished training runs."""

import statistics
from collections.abc import Iterable
from typing import NamedTuple

import jax
from ml_collections import ConfigDict

from experiments.common import records, workdir
from experiments.train import tasks

LINK_SPEEDS = {"100mbit": 1e8, "1gbit": 1e9, "10gbit": 1e10}
"""Bits per second of the links that exchange times are computed for."""

_BASELINE = "fp32"
_COMPUTED = "ms (computed from bytes)"


class _Measured(NamedTuple):
  value: float
  unit: str
  noise: float | None = None


def make_rows(
  config: ConfigDict, task: tasks.Task, runs: Iterable[workdir.Run]
) -> list[records.Row]:
  """Returns one row for each exchange and metric, over the seeds."""
  experiment = f"train_{config.experiment}"
  groups: dict[str, list[workdir.Run]] = {}
  for run in runs:
    groups.setdefault(run.exchange, []).append(run)
  # The workers of one process share its link.
  sharing = config.workers // count if (count := jax.process_count()) > 1 else 1
  cases = {
    name: _measure_exchange(task, group, sharing)
    for name, group in groups.items()
  }
  base = cases.get(_BASELINE, {})
  stamp = (records.describe_machine(), jax.__version__)
  rows = []
  for name, measured in cases.items():
    for metric, (value, unit, noise) in _add_ratio(measured, base).items():
      baseline = base[metric].value if metric in base else None
      ratio = value / baseline if baseline else None
      key = (experiment, name, metric)
      rows.append(
        records.Row(*key, value, unit, baseline, ratio, noise, *stamp)
      )
  for metric, fact, unit in task.facts:
    key = (experiment, "data", metric)
    rows.append(records.Row(*key, fact, unit, None, None, None, *stamp))
  return rows


def _measure_exchange(
  task: tasks.Task, runs: list[workdir.Run], sharing: int
) -> dict[str, _Measured]:
  """Returns the measurements of one exchange by metric, the score first."""
  scores = [run.score for run in runs]
  times = [run.step_ms for run in runs]
  sent = runs[0].wire_bytes
  return {
    task.metric: _Measured(
      statistics.fmean(scores), task.unit, _spread(scores)
    ),
    "loss": _Measured(statistics.fmean(run.loss for run in runs), "nats"),
    "wire_bytes_predicted": _Measured(sent, "bytes/step/worker"),
    "wire_bytes_compiled": _Measured(
      runs[0].compiled_bytes, "bytes/step/worker"
    ),
    "compile_s": _Measured(runs[0].compile_s, "s"),
    "step_ms": _Measured(statistics.median(times), "ms", _spread(times)),
    **{
      f"exchange_ms_{link}": _Measured(8e3 * sharing * sent / speed, _COMPUTED)
      for link, speed in LINK_SPEEDS.items()
    },
  }


def _add_ratio(
  measured: dict[str, _Measured], base: dict[str, _Measured]
) -> dict[str, _Measured]:
  if not base:
    return measured
  sent = "wire_bytes_predicted"
  ratio = _Measured(base[sent].value / measured[sent].value, "x")
  return measured | {"wire_ratio": ratio}


def _spread(values: list[float]) -> float | None:
  return statistics.stdev(values) if len(values) > 1 else None
