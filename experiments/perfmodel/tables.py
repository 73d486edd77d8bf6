"""Tables of calibrations, of validated predictions and of the scaling study."""

from collections.abc import Sequence

from experiments.common import records, tables
from experiments.perfmodel import measured, rows, score, sweep
from jaxmotion import perfmodel


def calibration_table(platform: perfmodel.Platform) -> tables.Table:
  """Returns a line for each measured curve of a platform."""
  lines = [
    [
      name,
      f"{curve.sizes[0]:.3g} to {curve.sizes[-1]:.3g}",
      f"{1e3 * curve.seconds[0]:.3g} ms",
      f"{1e3 * curve.seconds[-1]:.3g} ms",
      f"{curve.noise:.0%}",
      f"{curve.fit_line()[2]:.0%}",
      f"{measured.left_out_error(curve):.0%}",
    ]
    for name, curve in measured.platform_curves(platform).items()
  ]
  header = (
    *("operation", "sizes", "smallest", "largest", "noise"),
    *("off the line", "left-out error"),
  )
  caption = platform.sources["device.kernel_s"]
  return tables.Table(header, lines, title=platform.name, caption=caption)


def error_table(pairs: Sequence[score.Pair]) -> tables.Table:
  """Returns the errors of each testbed, and of each kind of held-out steps."""
  groups = rows.group_pairs(pairs)
  found = {name: score.score_errors(own) for name, own in groups.items()}
  return tables.Table(
    ("held-out steps", "steps", "MAPE", "bias", "max", "rank", "noise"),
    [
      [
        *(name, str(errors.pairs), f"{errors.mape:.1%}"),
        *(f"{errors.bias:+.1%}", f"{errors.worst:.1%}"),
        *(f"{errors.rank:.2f}", f"{errors.noise:.1%}"),
      ]
      for name, errors in found.items()
    ],
    title=f"Predicted against measured steps on {records.describe_machine()}",
    caption="Errors are relative to the measured step. Noise: half of the"
    " 10-90 % spread of its repeats.",
  )


def step_table(pairs: Sequence[score.Pair]) -> tables.Table:
  """Returns a line for each predicted and measured step."""
  lines = [
    [
      pair.testbed,
      pair.shape,
      pair.exchange,
      f"{1e3 * pair.predicted_s:.1f}",
      f"{1e3 * pair.measured_s:.1f}",
      f"{pair.error:+.0%}",
      f"{pair.noise:.0%}",
    ]
    for pair in pairs
  ]
  return tables.Table(
    ("testbed", "step", "exchange", "predicted", "measured", "error", "noise"),
    lines,
    title="Steps, ms",
    text_columns=(0, 1, 2),
  )


def decision_table(decisions: Sequence[score.Decision]) -> tables.Table:
  """Returns a line for each choice of an exchange, with the scores below."""
  scores = rows.score_decisions(decisions)
  lines = [
    [
      d.testbed,
      d.shape,
      d.chosen,
      d.best,
      f"{d.regret:.1%}",
      f"{d.noise:.1%}",
      "" if d.is_right else "wrong",
    ]
    for d in decisions
  ]
  return tables.Table(
    ("testbed", "step", "predicted", "measured", "regret", "noise", ""),
    lines,
    title="Which exchange is the fastest",
    caption="Right, or no slower than the noise: "
    f"{scores['decision_accuracy']:.0%} of {len(decisions)}; the fastest one "
    f"itself: {scores['decision_accuracy_strict']:.0%}; compress or not: "
    f"{scores['compress_or_not_accuracy']:.0%}; mean regret "
    f"{scores['regret']:.1%}.",
    text_columns=(0, 1, 2, 3),
  )


def scaling_table(points: Sequence[sweep.Point]) -> tables.Table:
  """Returns the fastest strategies of each network along each axis."""
  uncompressed = (sweep.BASELINE, "model")
  plain = sweep.find_crossings(p for p in points if p.strategy in uncompressed)
  lines = [
    [network, f"{axis}, {sweep.UNITS[axis]}", plain[network, axis], text]
    for (network, axis), text in sweep.find_crossings(points).items()
  ]
  return tables.Table(
    ("network", "axis", "without compression", "of all"),
    lines,
    title="The fastest strategy, from which value on (predicted)",
    text_columns=(0, 1, 2, 3),
  )
