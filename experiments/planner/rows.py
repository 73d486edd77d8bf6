"""Rows and tables of plans: an exchange's tensors, links, memory budgets."""

import re
import textwrap
from collections.abc import Sequence

from experiments.common import records, tables
from jaxmotion import planner


def make_rows(experiment: str, plan: planner.ExchangePlan) -> list[records.Row]:
  """Returns rows of the plan, of each codec for all tensors, of each tensor."""
  one = records.Measured
  name, machine = f"planner_{experiment}", plan.platform.name
  plain_ms = 1e3 * plan.uncompressed.total_s
  steps = [
    records.make_row(
      *(name, case, "step_ms_predicted", one(1e3 * seconds, "ms"), plain_ms),
      machine=machine,
    )
    for case, seconds in list_step_times(plan).items()
  ]
  cases: dict[str, dict[str, records.Measured]] = {
    "plan": {
      "wire_bytes_predicted": one(plan.step.wire_bytes, "bytes/step/worker"),
      "gradient_error": one(plan.error, "1"),
      "reason": one(plan.reason, "text"),
    }
  }
  for c in plan.choices:
    cases[c.path] = {
      "codec": one(repr(c.codec), "text"),
      "method": one(c.method, "text"),
      "wire_bytes_predicted": one(
        sum(c.axis_bytes.values()), "bytes/step/worker"
      ),
      "gradient_error": one(c.error, "1"),
      "reason": one(c.reason, "text"),
    }
  return steps + records.make_rows(name, cases, machine=machine)


def list_step_times(plan: planner.ExchangePlan) -> dict[str, float]:
  """Returns predicted step seconds of the plan, and of each codec alone."""
  alone = {planner.format_codec(c): s for c, s in plan.uniform_s.items()}
  return {"plan": plan.step.total_s} | alone


def tensor_table(plan: planner.ExchangePlan) -> tables.Table:
  """Returns codec, bytes, error and reason of each tensor."""
  lines = [
    (
      c.path,
      planner.format_codec(c.codec),
      c.method,
      f"{sum(c.axis_bytes.values()):,.0f}",
      f"{c.error:.2g}",
      c.reason,
    )
    for c in plan.choices
  ]
  return tables.Table(
    ("tensor", "codec", "method", "bytes/step", "error", "reason"),
    lines,
    title="Tensors",
    text_columns=(0, 1, 2, 5),
  )


def codec_table(plan: planner.ExchangePlan) -> tables.Table:
  """Returns the step time of the plan, and of each codec for all tensors."""
  lines = [
    (case, f"{1e3 * seconds:.4g}", f"{plan.uncompressed.total_s / seconds:.2f}")
    for case, seconds in list_step_times(plan).items()
  ]
  return tables.Table(
    ("codec", "step, ms", "speedup"),
    lines,
    title="The plan, and one codec for all tensors",
    caption="Predicted. A codec alone may not fit in the budget.",
  )


def summary_table(rows: Sequence[records.Row]) -> tables.Table:
  """Returns the table of a file of rows: memory plans, or plans on links."""
  if rows[0].experiment == "planner_links":
    return links_table(rows)
  return memory_table(rows)


def links_table(rows: Sequence[records.Row]) -> tables.Table:
  """Returns predicted steps on each link, with and without compression."""
  index = tables.index_rows(rows)
  lines = []
  for case in dict.fromkeys(row.case for row in rows):
    network, link = case.split(": ")
    step = index[case, "step_ms_predicted"]
    assert step.baseline is not None and step.ratio is not None
    lines.append(
      (
        network,
        link,
        f"{index[case, 'compute_ms_predicted'].value:,.1f}",
        f"{step.baseline:,.1f}",
        f"{step.value:,.1f}",
        f"{1 / step.ratio:.2f}",
        str(index[case, "plan"].value),
      )
    )
  return tables.Table(
    (
      *("network", "link", "no exchange, ms", "float32, ms", "plan, ms"),
      *("faster", "codecs of the plan: tensors"),
    ),
    lines,
    title="Will it pay?",
    caption="Predicted. Nothing was run.",
    text_columns=(0, 1, 6),
  )


# Letters of a plan in a table. Plans of unrolled networks name every residual.
_MOST_LETTERS = 70


def format_plan(name: str) -> str:
  """Shortens the name of a memory plan to fit a column."""
  name = name.replace("compress_residuals", "ours").replace("()", "")
  name = name.replace("memory_budget", "budget").replace("'", "")
  name = re.sub(r"policy=save_only_these_names\(([^)]*)\)", r"save \1", name)
  return textwrap.shorten(name, _MOST_LETTERS, placeholder=" ...")


def _format_model(model: str, options: str) -> str:
  """Returns a model's name in words, with options that are not "exact"."""
  words = model.replace("_", " ").replace(":", ", ").replace("=", " ")
  return words if options == "exact" else f"{words}, {options}"


def memory_table(rows: Sequence[records.Row]) -> tables.Table:
  """Returns memory plans, each beside the fastest plan made by hand."""
  cases: dict[str, dict[str, records.Row]] = {}
  for row in rows:
    cases.setdefault(row.case, {})[row.metric] = row
  lines = []
  for case, own in cases.items():
    if "budget_bytes" not in own:  # Errors of plans by hand.
      continue
    model, options, _ = case.split("/")
    least = own.get("least_bytes")
    step, error, hand_ms = "none", "-", "-"
    if least is None:
      predicted, ms = own["device_bytes_predicted"], own["step_ms_predicted"]
      step = f"{ms.value:.1f}"
      if predicted.ratio is not None:
        error = f"{100 * (predicted.ratio - 1):+.1f} %"
      if ms.baseline is not None:
        hand_ms = f"{ms.baseline:.1f}"
    plan = own["plan"].value if least is None else f"at least {least.value} B"
    lines.append(
      (
        _format_model(model, options),
        f"{float(own['budget_bytes'].value) / 1e9:.2f}",
        format_plan(str(plan)),
        step,
        str(own["by_hand"].value).replace("_", " "),
        hand_ms,
        error,
        f"{own['compilations'].value:.0f}",
        f"{own['fit_s'].value:.0f}",
      )
    )
  header = (
    *("model", "budget, GB", "plan", "step, ms", "by hand", "its step, ms"),
    *("memory off by", "programs", "seconds"),
  )
  return tables.Table(
    header,
    lines,
    title="Plans within memory budgets",
    caption="Steps are predicted. Nothing was run.",
    text_columns=(0, 2, 4),
  )
