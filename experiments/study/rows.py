"""Rows and table: scores at equal steps, equal bytes and equal time."""

import itertools
import math
import statistics
from collections.abc import Sequence

from ml_collections import ConfigDict

from experiments.common import records, tables
from experiments.common.records import Measured, Row
from experiments.common.tables import Table
from experiments.study import trainer
from experiments.study.trainer import StudyRun
from experiments.train.tasks import Task

BASELINE = "fp32"
DIVERGED = "diverged"
_CLOSE = 0.05  # Times of equal programs differ by as much.
_EMULATED = "ms (emulated)"
_PREDICTED = "ms (predicted)"

Found = dict[str, Measured]

Curve = list[tuple[float, float]]
"""Cost of a whole run and its mean score, the cheapest run first."""


def make_rows(
  config: ConfigDict, task: Task, runs: Sequence[StudyRun]
) -> list[Row]:
  """Returns the rows of all runs so far, an algorithm after the other."""
  cases = {}
  for name in config.algorithms:
    own = [run for run in runs if run.trial.algorithm == name]
    if any(run.trial.seed in config.seeds for run in own):
      cases[name] = own
  measured = {
    name: _measure_algorithm(config, task, own) for name, own in cases.items()
  }
  if BASELINE in cases:
    budgets = _list_costs(config, cases[BASELINE])
    for name, own in cases.items():
      measured[name] |= _score_budgets(config, task, own, budgets)
  return records.make_rows(
    f"study_{config.experiment}", measured, measured.get(BASELINE, {})
  )


def score_at(curve: Curve, budget: float) -> float | None:
  """Returns the score that a cost buys, linear in the cost's logarithm."""
  if not curve or budget < curve[0][0] * (1 - _CLOSE):
    return None
  for (low, worse), (high, better) in itertools.pairwise(curve):
    if budget < high:
      share = max(0.0, math.log(budget / low)) / math.log(high / low)
      return worse + share * (better - worse)
  return curve[-1][1]


def _final_runs(
  config: ConfigDict, runs: Sequence[StudyRun]
) -> dict[int, list[StudyRun]]:
  """Returns the runs of the study's seeds by length, the longest first."""
  found: dict[int, list[StudyRun]] = {}
  for length in sorted(config.lengths, reverse=True):
    own = [
      run
      for run in runs
      if run.trial.steps == length and run.trial.seed in config.seeds
    ]
    if own:
      found[length] = own
  return found


def _step_ms(runs: Sequence[StudyRun]) -> float:
  """Returns the time of a step when other programs lengthened it least."""
  return min(run.step_ms for run in runs)


def _measure_algorithm(
  config: ConfigDict, task: Task, runs: Sequence[StudyRun]
) -> Found:
  """Returns scores of each length, the chosen rates, bytes and times."""
  one = Measured
  found: Found = {}
  finals = _final_runs(config, runs)
  for length, own in finals.items():
    scores = [run.score for run in own if run.score is not None]
    value: float | str = DIVERGED
    if len(scores) == len(own):
      value = statistics.fmean(scores)
    noise = records.find_spread(scores)
    found[f"{task.metric}_{length}"] = one(value, task.unit, noise)
  last = next(iter(finals.values()))
  chosen = last[0]
  losses = [run.loss for run in last if run.loss is not None]
  loss = statistics.fmean(losses) if len(losses) == len(last) else DIVERGED
  found["loss"] = one(loss, "nats")
  found["seeds"] = one(len(last), "runs")
  found["rate"] = one(chosen.trial.rate, "1")
  if chosen.trial.outer_rate is not None:
    found["outer_rate"] = one(chosen.trial.outer_rate, "1")
  tried = ", ".join(
    _describe_trial(run) for run in runs if run.trial.seed == config.trial_seed
  )
  unit = f"{task.unit} at learning rates, {config.trial_steps} steps"
  found["trials"] = one(tried, unit)
  found["wire_bytes"] = one(chosen.wire_bytes, "bytes/step/worker")
  found["step_ms"] = one(_step_ms(runs), _EMULATED)
  for link, ms in zip(trainer.LINKS, chosen.link_ms, strict=True):
    found[f"link_ms_{link}"] = one(ms, _PREDICTED)
  return found


def _describe_trial(run: StudyRun) -> str:
  _, _, _, *rates = run.trial
  tried = "/".join(f"{rate:.3g}" for rate in rates if rate is not None)
  score = DIVERGED if run.score is None else f"{run.score:.4g}"
  return f"{tried}: {score}"


def _list_costs(
  config: ConfigDict, runs: Sequence[StudyRun]
) -> dict[str, dict[int, float]]:
  """Returns what runs of each length cost: bytes, and seconds on each link."""
  step_ms = _step_ms(runs)
  costs: dict[str, dict[int, float]] = {}
  for length, (first, *_) in sorted(_final_runs(config, runs).items()):
    costs.setdefault("bytes", {})[length] = length * first.wire_bytes
    for link, ms in zip(trainer.LINKS, first.link_ms, strict=True):
      seconds = length * (step_ms + ms) / 1e3
      costs.setdefault(f"time_{link}", {})[length] = seconds
  return costs


def _score_budgets(
  config: ConfigDict,
  task: Task,
  runs: Sequence[StudyRun],
  budgets: dict[str, dict[int, float]],
) -> Found:
  """Returns an algorithm's costs, and its scores for those of the baseline."""
  finals = _final_runs(config, runs)
  found: Found = {}
  for kind, costs in _list_costs(config, runs).items():
    unit = "bytes" if kind == "bytes" else "s (emulated and predicted)"
    curve: Curve = []
    for length, cost in costs.items():
      found[f"cost_{kind}_{length}"] = Measured(cost, unit)
      scores = [run.score for run in finals[length] if run.score is not None]
      if len(scores) == len(finals[length]):
        curve.append((cost, statistics.fmean(scores)))
    for length, budget in list(budgets[kind].items())[:-1]:
      score = score_at(curve, budget)
      if score is not None:
        name, unit = f"{task.metric}_equal_{kind}_{length}", task.unit
        found[name] = Measured(score, f"{unit} (interpolated)")
  return found


_NOTHING = "-"


def summary_table(rows: Sequence[Row]) -> Table:
  """Returns a line for each algorithm."""
  found = tables.index_rows(rows)
  longest = rows[0].metric
  metric, steps = longest.rsplit("_", 1)
  unit, digits = rows[0].unit, 2 if rows[0].unit == "%" else 3
  prefix = f"{metric}_equal_bytes_"
  spent = max(
    (int(r.metric.removeprefix(prefix)) for r in rows if prefix in r.metric),
    default=0,
  )
  budgets = [f"{metric}_equal_bytes_{spent}"]
  budgets += [f"{metric}_equal_time_{link}_{spent}" for link in trainer.LINKS]

  def format_budget(case: str, name: str) -> str:
    row = found.get((case, name))
    return _NOTHING if row is None else f"{float(row.value):.{digits}f}"

  lines = []
  for case in dict.fromkeys(row.case for row in rows):
    row = found.get((case, longest))
    score = _NOTHING if row is None else DIVERGED
    if row and row.value != DIVERGED:
      score = tables.format_noise(row, digits)
    sent = found[case, "wire_bytes"]
    rates = [found.get((case, name)) for name in ("rate", "outer_rate")]
    lines.append(
      (
        case,
        ", ".join(f"{float(r.value):.2g}" for r in rates if r is not None),
        score,
        _NOTHING
        if sent.baseline is None
        else f"{sent.baseline / float(sent.value):.1f}",
        f"{float(found[case, 'step_ms'].value):.1f}",
        *(format_budget(case, name) for name in budgets),
      )
    )
  header = (
    "algorithm",
    "rates",
    f"{metric.replace('_', ' ')}{', %' * (unit == '%')}, {steps} steps",
    "fewer bytes",
    "step, ms",
    f"bytes of {spent} steps of fp32",
    "time at 10 Mbit/s",
    "at 100 Mbit/s",
    "at 1 Gbit/s",
  )
  return Table(
    header,
    lines,
    title=f"{rows[0].experiment} on {rows[0].machine}, JAX {rows[0].jax}",
    caption="± is the standard deviation over the seeds. The last four columns"
    f" are scores that the bytes, and the time, of {spent} steps of fp32"
    " buy. Times of steps are emulated, those of links predicted.",
  )
