"""Rows of an exchange plan: predicted steps, and the choice for each tensor."""

import jax

from experiments.common import records
from jaxmotion import planner


def make_rows(experiment: str, plan: planner.ExchangePlan) -> list[records.Row]:
  """Returns rows of the plan, of each codec for all tensors, of each tensor."""
  experiment = f"planner_{experiment}"
  stamp = plan.platform.name, jax.__version__
  plain_ms = 1e3 * plan.uncompressed.total_s
  rows = []
  for case, seconds in list_step_times(plan).items():
    ms = 1e3 * seconds
    key = (experiment, case, "step_ms_predicted", ms, "ms")
    rows.append(records.Row(*key, plain_ms, ms / plain_ms, None, *stamp))
  facts: list[tuple[str, str, float | str, str]] = [
    ("plan", "wire_bytes_predicted", plan.step.wire_bytes, "bytes/step/worker"),
    ("plan", "gradient_error", plan.error, "1"),
    ("plan", "reason", plan.reason, "text"),
  ]
  for c in plan.choices:
    facts += [
      (c.path, "codec", repr(c.codec), "text"),
      (c.path, "method", c.method, "text"),
      (c.path, "wire_bytes_predicted", c.wire_bytes, "bytes/step/worker"),
      (c.path, "gradient_error", c.error, "1"),
      (c.path, "reason", c.reason, "text"),
    ]
  return rows + [
    records.Row(experiment, *fact, None, None, None, *stamp) for fact in facts
  ]


def list_step_times(plan: planner.ExchangePlan) -> dict[str, float]:
  """Returns predicted step seconds of the plan, and of each codec alone."""
  alone = {planner.format_codec(c): s for c, s in plan.uniform_s.items()}
  return {"plan": plan.step.total_s} | alone
