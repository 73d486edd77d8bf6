"""Counts the dents in the frontier of memory budgets, without compiling.

  JAX_PLATFORMS=cpu python -m experiments.residuals.frontier \\
    --models=llama,graph:layers=2

Training steps are traced and predicted: plain, under every stock policy, by
default and under budgets from 1 to 0 in steps of 1/16. Dents:
  bytes       a smaller budget holds more;
  FLOPs, ms   a smaller budget takes less;
  by FLOPs    a stock policy holds less than all of ours at its FLOPs, by more
              than 1 %;
  by ms       likewise, at its predicted time;
  plain       one of ours holds more than plain training, by more than 2 %.
Bytes are the most that the step holds at once, arguments and results included.
"""

import itertools
from typing import NamedTuple

from absl import flags

from experiments.common import (
  list_flags,
  records,
  shared_flags,
  tables as common,
)
from experiments.common.console import make_console
from experiments.common.records import Measured
from experiments.models import losses
from experiments.residuals import measure, networks, policies, tables

_STEPS = 16
_STOCK_SHARE = 0.01
_PLAIN_SHARE = 0.02


class Dents(NamedTuple):
  """Numbers of places where a frontier is not what it should be."""

  bytes: int
  flops: int
  step_ms: int
  stock_by_flops: int
  stock_by_ms: int
  above_plain: int


def predict_points(make_task: policies.MakeTask, target: str) -> tables.Points:
  """Predicts the steps of all policies whose gradients are exact."""
  task = make_task()
  others = [
    policy
    for policy in policies.list_policies(make_task)
    if policies.is_exact(policy.name) and "budget" not in policy.name
  ]
  budgets = [
    policies.make_budget(task, n / _STEPS) for n in range(_STEPS, -1, -1)
  ]
  points: tables.Points = {}
  for policy in (*others, *budgets):
    found = measure.predict_figures(policy.build_step(), 0, target)
    points[policy.name] = {
      "temp_bytes": found.peak_bytes,
      "flops": found.flops,
      "step_ms_predicted": 1e3 * found.step_s,
    }
  return points


def count_dents(points: tables.Points) -> Dents:
  """Counts the dents of a model's frontier."""
  # Policies are in the order in which they were predicted: from budget 1 to 0.
  budgets = [p for name, p in points.items() if name.startswith("ours_budget")]

  def count_steps(metric: str, sign: int) -> int:
    """Counts the budgets whose metric changes in the wrong direction."""
    return sum(
      sign * (b[metric] - a[metric]) > tables.EQUAL_SHARE * a[metric]
      for a, b in itertools.pairwise(budgets)
    )

  def count_stock(metric: str) -> int:
    return sum(
      loss.ours is None or loss.ours > (1 + _STOCK_SHARE) * loss.nbytes
      for loss in tables.find_losses(points, metric)
    )

  plain = points["plain"]["temp_bytes"]
  return Dents(
    count_steps("temp_bytes", 1),
    count_steps("flops", -1),
    count_steps("step_ms_predicted", -1),
    count_stock("flops"),
    count_stock("step_ms_predicted"),
    sum(
      found["temp_bytes"] > (1 + _PLAIN_SHARE) * plain
      for name, found in points.items()
      if policies.is_ours(name)
    ),
  )


_MODELS = list_flags.define_items(
  "models", list(losses.TASKS), networks.check_model, "Models to predict."
)
_TARGET = measure.define_target()
_JSON = shared_flags.define_rows()
_POINTS = flags.DEFINE_bool("points", False, "Print every policy's figures.")


def main() -> None:
  """Predicts all models, and prints a line of dents for each."""
  lines, found_dents = [], {}
  for text in _MODELS.value:
    points = predict_points(losses.parse_task(text), _TARGET.value)
    dents = count_dents(points)
    found_dents[text] = {
      name: Measured(count, "dents") for name, count in dents._asdict().items()
    }
    rows = records.make_rows("residuals_frontier", found_dents)
    records.write_rows(_JSON.value, rows)
    lines.append((text, *map(str, dents)))
    print(*lines[-1], flush=True)
    for name, found in points.items() if _POINTS.value else ():
      print(
        f"{name:32s} {found['temp_bytes'] / 2**20:10,.1f} MiB"
        f" {found['flops'] / 1e12:8.4f} TFLOP"
        f" {found['step_ms_predicted']:8.3f} ms",
        flush=True,
      )
  header = ("model", "bytes", "FLOPs", "ms", "by FLOPs", "by ms", "plain")
  table = common.Table(
    header, lines, title="Dents, predicted", text_columns=(0,)
  )
  make_console().print(table.to_console())


if __name__ == "__main__":
  shared_flags.run_main(main)
