"""What was predicted and measured, as rows, tables and a plot."""

import os
import pathlib
import statistics
from collections.abc import Sequence

import jax
import rich.table
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from experiments.common import records
from experiments.common.records import Row
from experiments.perfmodel.score import Decision, Errors, Pair, errors

_ALL = "all"


def groups(pairs: Sequence[Pair]) -> dict[str, list[Pair]]:
  """Pairs by testbed, and those of each testbed by what was held out."""
  found: dict[str, list[Pair]] = {}
  for pair in pairs:
    found.setdefault(f"{pair.testbed} {_ALL}", []).append(pair)
  for pair in pairs:
    found.setdefault(f"{pair.testbed} held out: {pair.held}", []).append(pair)
  return dict(sorted(found.items()))


def make_rows(
  pairs: Sequence[Pair], decisions: Sequence[Decision]
) -> list[Row]:
  """A row for each step, predicted and measured, then those of the scores."""
  stamp = (records.describe_machine(), jax.__version__)
  rows = []
  for pair in pairs:
    rows.append(
      Row(
        f"perfmodel_validate_{pair.testbed}",
        f"{pair.exchange} {pair.shape}",
        "predicted_step_ms",
        1e3 * pair.predicted_s,
        "ms",
        1e3 * pair.measured_s,
        pair.predicted_s / pair.measured_s,
        1e3 * pair.measured_s * pair.noise,
        *stamp,
      )
    )
  for name, members in groups(pairs).items():
    testbed, _, case = name.partition(" ")
    found = errors(members)
    scores = {
      "mape": found.mape,
      "bias": found.bias,
      "max_error": found.worst,
      "rank_correlation": found.rank,
    }
    rows += [
      Row(
        f"perfmodel_validate_{testbed}",
        case,
        metric,
        value,
        "1",
        None,
        None,
        found.noise,
        *stamp,
      )
      for metric, value in scores.items()
    ]
  for testbed, choices in _by_testbed(decisions).items():
    rows += [
      Row(
        f"perfmodel_validate_{testbed}",
        _ALL,
        m,
        v,
        "1",
        None,
        None,
        None,
        *stamp,
      )
      for m, v in decision_scores(choices).items()
    ]
  return rows


def _by_testbed(decisions: Sequence[Decision]) -> dict[str, list[Decision]]:
  found: dict[str, list[Decision]] = {_ALL: list(decisions)}
  for decision in decisions:
    found.setdefault(decision.testbed, []).append(decision)
  return found


def decision_scores(decisions: Sequence[Decision]) -> dict[str, float]:
  """Shares of right choices, and what wrong ones cost."""
  return {
    "decision_accuracy": statistics.fmean(d.right for d in decisions),
    "decision_accuracy_strict": statistics.fmean(
      d.chosen == d.best for d in decisions
    ),
    "compress_or_not_accuracy": statistics.fmean(
      d.compresses for d in decisions
    ),
    "regret": statistics.fmean(d.regret for d in decisions),
    "decisions": len(decisions),
  }


def make_error_table(pairs: Sequence[Pair]) -> rich.table.Table:
  """A line for each testbed, and for what was held out on it."""
  table = rich.table.Table(
    title=f"Predicted against measured steps on {records.describe_machine()}",
    caption="Errors are relative to the measured step. Noise: half of the"
    " 10-90 % spread of its repeats.",
  )
  table.add_column("held-out steps")
  for name in ("steps", "MAPE", "bias", "max", "rank", "noise"):
    table.add_column(name, justify="right")
  for name, members in groups(pairs).items():
    table.add_row(name, *_cells(errors(members)))
  return table


def _cells(found: Errors) -> list[str]:
  return [
    str(found.pairs),
    f"{found.mape:.1%}",
    f"{found.bias:+.1%}",
    f"{found.worst:.1%}",
    f"{found.rank:.2f}",
    f"{found.noise:.1%}",
  ]


def make_step_table(pairs: Sequence[Pair]) -> rich.table.Table:
  """A line for each step."""
  table = rich.table.Table(title="Steps, ms")
  for name in ("testbed", "step", "exchange"):
    table.add_column(name)
  for name in ("predicted", "measured", "error", "noise"):
    table.add_column(name, justify="right")
  for pair in pairs:
    table.add_row(
      pair.testbed,
      pair.shape,
      pair.exchange,
      f"{1e3 * pair.predicted_s:.1f}",
      f"{1e3 * pair.measured_s:.1f}",
      f"{pair.error:+.0%}",
      f"{pair.noise:.0%}",
    )
  return table


def make_decision_table(decisions: Sequence[Decision]) -> rich.table.Table:
  """A line for each choice; the scores below."""
  found = decision_scores(decisions)
  table = rich.table.Table(
    title="Which exchange is the fastest",
    caption=f"Right, or no slower than the noise: "
    f"{found['decision_accuracy']:.0%} of {len(decisions)}; the fastest one "
    f"itself: {found['decision_accuracy_strict']:.0%}; compress or not: "
    f"{found['compress_or_not_accuracy']:.0%}; mean regret "
    f"{found['regret']:.1%}.",
  )
  for name in ("testbed", "step", "predicted", "measured"):
    table.add_column(name)
  for name in ("regret", "noise", ""):
    table.add_column(name, justify="right")
  for d in decisions:
    table.add_row(
      d.testbed,
      d.shape,
      d.chosen,
      d.best,
      f"{d.regret:.1%}",
      f"{d.noise:.1%}",
      "" if d.right else "wrong",
    )
  return table


def save_plot(pairs: Sequence[Pair], path: str | os.PathLike[str]) -> None:
  """Draws predicted over measured steps, with a band of 15 %.

  Args:
    pairs: of any testbeds.
    path: of the image; its suffix chooses the format.
  """
  figure = Figure(figsize=(6.5, 6), layout="constrained")
  FigureCanvasAgg(figure)
  axes = figure.add_subplot()
  for testbed in dict.fromkeys(pair.testbed for pair in pairs):
    own = [pair for pair in pairs if pair.testbed == testbed]
    measured = [1e3 * pair.measured_s for pair in own]
    axes.errorbar(
      measured,
      [1e3 * pair.predicted_s for pair in own],
      xerr=[m * pair.noise for m, pair in zip(measured, own, strict=True)],
      fmt="o",
      markersize=4,
      alpha=0.7,
      label=f"{testbed}: {errors(own).mape:.1%}",
    )
  ends = [1e3 * f(pair.measured_s for pair in pairs) for f in (min, max)]
  axes.plot(ends, ends, color="black", linewidth=1)
  axes.fill_between(
    ends, [0.85 * e for e in ends], [1.15 * e for e in ends], alpha=0.15
  )
  axes.set_xscale("log")
  axes.set_yscale("log")
  axes.set_xlabel("measured step, ms (bars: noise)")
  axes.set_ylabel("predicted step, ms (band: 15 %)")
  axes.set_title("Held-out steps; mean absolute error by testbed")
  axes.legend()
  pathlib.Path(path).parent.mkdir(parents=True, exist_ok=True)
  figure.savefig(path, dpi=150)
