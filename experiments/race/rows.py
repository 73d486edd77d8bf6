"""Rows of the race, and the table of minutes to a loss."""

import itertools
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from experiments.common import records
from experiments.common.records import Row
from experiments.common.tables import Table
from experiments.race import cases

DIVERGED = "diverged"
TRIAL = "trial"
"""Stands in the name of a run where others have their link."""

_BASELINES = ("torch_fp32", "fp32")  # Its losses are the targets.
_SHARES = (0.25, 0.5, 1.0)  # Parts of the baseline's run.


class Point(NamedTuple):
  """One evaluation of a run."""

  steps: int  # Steps so far.
  minutes: float  # Minutes of training so far.
  loss: float  # Mean loss of the held-out text, nats a byte.


Curve = Sequence[Point]
"""Evaluations of a run, the first before its first step."""


class Group(NamedTuple):
  """Names the link, case and steps of runs that differ in their seeds."""

  link: str
  case: str
  steps: int


class Runs(NamedTuple):
  """The runs of a case over a link, one for each seed."""

  curves: dict[int, Curve]  # By seed.
  found: dict[str, list[float]]  # Values of metrics that are numbers.

  @property
  def seeds(self) -> int:
    """Number of runs of a case on a link."""
    return len(self.curves)

  def mean(self, metric: str) -> float | None:
    """Returns the mean of a metric, None if a run lacks it."""
    values = self.found.get(metric, [])
    return statistics.fmean(values) if len(values) == self.seeds else None


def write_curve(curve: Curve) -> str:
  """Returns a curve as the text of a row.

  >>> write_curve([Point(0, 0.0, 5.5), Point(8, 0.125, 4.25)])
  '0 0.0000 5.5000; 8 0.1250 4.2500'
  """
  return "; ".join(f"{n} {m:.4f} {loss:.4f}" for n, m, loss in curve)


def read_curve(text: str) -> Curve:
  """Returns the curve that `write_curve` wrote."""
  points = (point.split() for point in text.split("; "))
  return [Point(int(n), float(m), float(loss)) for n, m, loss in points]


def best_rates(rows: Sequence[Row]) -> dict[str, float]:
  """Returns the rate of the trial with the least loss, by case."""
  found: dict[str, list[tuple[float, float]]] = {}
  for row in rows:
    link, case, _, rate = row.case.split("/")
    if link == TRIAL and row.metric == "loss" and row.value != DIVERGED:
      found.setdefault(case, []).append((float(row.value), float(rate)))
  return {case: min(tried)[1] for case, tried in found.items()}


def group_runs(rows: Sequence[Row]) -> dict[Group, Runs]:
  """Returns the runs of links in the order of the cases."""
  grouped: dict[Group, Runs] = {}
  for row in rows:
    link, case, steps, seed = row.case.split("/")
    if link == TRIAL:
      continue
    runs = grouped.setdefault(Group(link, case, int(steps)), Runs({}, {}))
    if row.metric == "curve":
      runs.curves[int(seed)] = read_curve(str(row.value))
    elif not isinstance(row.value, str):
      runs.found.setdefault(row.metric, []).append(row.value)
  places = {name: i for i, name in enumerate((*cases.LINKS, *cases.CASES))}
  order = lambda group: (places[group.link], places[group.case], group.steps)
  return {group: grouped[group] for group in sorted(grouped, key=order)}


def select_longest(grouped: Mapping[Group, Runs]) -> dict[Group, Runs]:
  """Returns the runs of most steps, which can be compared."""
  # A schedule of more steps passes a loss earlier.
  steps = max((group.steps for group in grouped), default=0)
  return {
    group: runs for group, runs in grouped.items() if group.steps == steps
  }


def find_baseline(grouped: Mapping[Group, Runs]) -> str:
  """Returns the case that others are compared with."""
  found = {group.case for group in grouped}
  return next((case for case in _BASELINES if case in found), _BASELINES[-1])


def find_targets(grouped: Mapping[Group, Runs]) -> list[dict[int, float]]:
  """Returns three losses that the fp32 baseline has on its way, by seed."""
  baseline = find_baseline(grouped)
  runs = [group for group in grouped if group.case == baseline]
  # All links see the same losses, but for the order of sums.
  steps = min((group.steps for group in runs), default=0)
  found: dict[int, list[Curve]] = {}
  for group in runs:
    if group.steps == steps:
      for seed, curve in grouped[group].curves.items():
        found.setdefault(seed, []).append(curve)
  if not found:
    return []
  return [
    {
      seed: statistics.fmean(_loss_at(curve, share) for curve in curves)
      for seed, curves in found.items()
    }
    for share in _SHARES
  ]


def _loss_at(curve: Curve, share: float) -> float:
  """Returns the loss at the last evaluation in a part of the steps."""
  limit = share * curve[-1].steps
  return [point.loss for point in curve if point.steps <= limit][-1]


def minutes_to(curve: Curve, loss: float) -> float | None:
  """Returns the minutes until a loss, linear between two evaluations."""
  for a, b in itertools.pairwise(curve):
    if b.loss <= loss:
      share = (a.loss - loss) / (a.loss - b.loss) if a.loss > loss else 0.0
      return a.minutes + share * (b.minutes - a.minutes)
  return None


def _mean_minutes(runs: Runs, target: Mapping[int, float]) -> float | None:
  """Returns the mean minutes until a loss, None if a seed never has it."""
  # Seeds have batches of their own, so each has its own target.
  reached = [
    minutes_to(curve, target.get(seed, -math.inf))
    for seed, curve in runs.curves.items()
  ]
  known = [minutes for minutes in reached if minutes is not None]
  # A mean over the seeds that reach it would flatter the case.
  return statistics.fmean(known) if len(known) == len(reached) else None


def _last_minutes(
  grouped: Mapping[Group, Runs],
) -> dict[tuple[str, str], float]:
  """Returns minutes of the longest runs to the last loss, by link and case."""
  targets = find_targets(grouped)[-1:]
  found = {
    (group.link, group.case): _mean_minutes(runs, target)
    for group, runs in select_longest(grouped).items()
    for target in targets
  }
  return {key: taken for key, taken in found.items() if taken is not None}


def predict_minutes(
  grouped: Mapping[Group, Runs], group: Group
) -> float | None:
  """Predicts minutes from the step of one host, and from the exchange."""
  # Of as many steps, if there are such runs: they ran at about the same time.
  alone = group._replace(case=cases.alone_name(group.case))
  runs = grouped.get(alone)
  step_ms = runs.mean("step_ms") if runs else None
  if step_ms is None:
    step_ms = _measured_ms(grouped, group.link).get(alone.case)
  exchange_ms = grouped[group].mean("exchange_ms_predicted")
  if step_ms is None or exchange_ms is None:
    return None
  hidden_ms = cases.OVERLAPPED.get(group.case, 0.0) * step_ms
  step_ms += max(0.0, exchange_ms - hidden_ms)
  return step_ms * group.steps / 60e3


def _measured_ms(grouped: Mapping[Group, Runs], link: str) -> dict[str, float]:
  """Returns the milliseconds of a step on a link by case, of its first runs."""
  found: dict[str, float] = {}
  for group, runs in grouped.items():
    step_ms = runs.mean("step_ms")
    if group.link == link and step_ms is not None:
      found.setdefault(group.case, step_ms)
  return found


def advice_table(
  rows: Sequence[Row], advise: Callable[[str, float], Mapping[str, float]]
) -> Table:
  """Returns the case that is advised, and the first at the loss, by link."""
  # advise: from a link and the seconds of one host's step to the seconds of a
  # step with each case that is advised.
  grouped = group_runs(rows)
  minutes, longest = _last_minutes(grouped), select_longest(grouped)
  lines = []
  for link in cases.LINKS:
    raced = {
      case: taken
      for (place, case), taken in minutes.items()
      if place == link and not cases.is_alone(case)
    }
    measured = _measured_ms(longest, link)
    alone_ms = measured.get(cases.alone_name("fp32"))
    if not raced or alone_ms is None:
      continue
    advised = advise(link, alone_ms / 1e3)
    known = {case: s for case, s in advised.items() if case in measured}
    if not known:
      continue
    named = min(known, key=known.__getitem__)
    first = min(raced, key=raced.__getitem__)
    taken = raced.get(named)
    ratio = None if taken is None else taken / raced[first]
    lines.append(
      (
        *(link, named, f"{1e3 * known[named]:.0f}", f"{measured[named]:.0f}"),
        *(_format_number(taken, 2) or "-", first, f"{raced[first]:.2f}"),
        _format_number(ratio, 2) or "-",
      )
    )
  heads = "link", "advised", "predicted, ms", "measured, ms", "minutes"
  return Table(
    (*heads, "first", "its minutes", "ratio"),
    lines,
    title="What planner.advise names, and what was first at the loss",
    text_columns=(0, 1, 5),
  )


def summary_table(rows: Sequence[Row]) -> Table:
  """Returns losses and minutes, a line for each case and link."""
  grouped = group_runs(rows)
  targets = find_targets(grouped)
  lines = []
  for group, runs in grouped.items():
    sent = runs.mean("interface_bytes")
    reached = [_mean_minutes(runs, target) for target in targets]
    lines.append(
      (
        " ".join(map(str, group)),
        _format_loss(runs),
        _format_number(runs.mean("minutes"), 2),
        _format_number(predict_minutes(grouped, group), 2),
        *(_format_number(minutes, 2) or "-" for minutes in reached),
        "" if sent is None else f"{sent / 1e6:.3f}",
      )
    )
  return Table(
    (
      *("link, case, steps", "loss", "minutes", "predicted"),
      *(f"to {statistics.fmean(t.values()):.3f}" for t in targets),
      "MB a step",
    ),
    lines,
    title=f"Minutes to a loss on {rows[0].machine}",
    caption="Loss of held-out text, nats a byte, ± the standard deviation of"
    " seeds. Minutes of training, and those until a loss that the fp32 baseline"
    " has after a quarter, half and all of its steps; - is never. MB a host.",
  )


def gain_table(rows: Sequence[Row]) -> Table:
  """Returns minutes to the last target, and gains, by case and link."""
  grouped = group_runs(rows)
  baseline, found = find_baseline(grouped), _last_minutes(grouped)
  links = [link for link in cases.LINKS if (link, baseline) in found]
  lines = []
  for case in cases.CASES:
    cells = []
    for link in links:
      minutes, most = found.get((link, case)), found[link, baseline]
      cells += (
        ["-", "-"]
        if minutes is None
        else [f"{minutes:.2f}", f"{most / minutes:.1f}"]
      )
    if set(cells) - {"-"}:
      lines.append((f"`{case}`", *cells))
  heads = itertools.chain(*((f"{link}, min", "gain") for link in links))
  return Table(
    ("case", *heads),
    lines,
    title=f"Minutes to {baseline}'s loss, and times as fast; longest runs",
  )


def trial_table(rows: Sequence[Row]) -> Table:
  """Returns the losses of trials, a line for each case."""
  tried: dict[str, dict[str, str]] = {}
  for row in rows:
    link, case, _, rate = row.case.split("/")
    if link == TRIAL and row.metric == "loss":
      loss = row.value if isinstance(row.value, str) else f"{row.value:.3f}"
      tried.setdefault(case, {})[rate] = loss
  rates = sorted({rate for own in tried.values() for rate in own}, key=float)
  lines = [
    (case, *(own.get(rate, "") for rate in rates))
    for case, own in tried.items()
  ]
  return Table(("case", *rates), lines, title="Loss of trials by rate")


def _format_loss(runs: Runs) -> str:
  losses = runs.found.get("loss", [])
  if len(losses) < runs.seeds:
    return DIVERGED
  spread = records.find_spread(losses)
  end = "" if spread is None else f" ± {spread:.3f}"
  return f"{statistics.fmean(losses):.3f}{end}"


def _format_number(value: float | None, digits: int) -> str:
  return "" if value is None else f"{value:.{digits}f}"
