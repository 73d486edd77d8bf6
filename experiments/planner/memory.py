"""Compares plans of `planner.fit_memory` with plans made by hand.

  JAX_PLATFORMS=cpu python -m experiments.planner.memory \\
    --models=gpt,moe,resnet50 --json=results/fit_memory.jsonl

Models are those of `experiments.models.losses`, with options as in
`gpt:layers=12`. Plans made by hand are the policies of `jax.checkpoint`, around
each block and around the loss, those of the names that the model gives, and
`memory.compress_residuals` by default, by eleven budgets, by single names, with
everything on the host, and (`rounded`) in 8 and 4 bits. Budgets lie between
what plain training takes (depth 0) and the least that a plan by hand takes
(depth 1).

Metrics, of the plan of each budget:
  step_ms_predicted       time of the step; baseline: the fastest plan by hand
                          that fits;
  device_bytes_predicted  memory of the step; baseline: compiled;
  device_bytes            likewise, compiled for a GPU that need not be there;
  by_hand_bytes           that of the fastest plan by hand, if compiled;
  compilations, fit_s     programs that were compiled, and processor seconds.
Of all plans by hand, which `--noall` leaves out:
  plans_within_15_percent  plans whose memory is predicted within 15 % of what
                           is compiled; baseline: all;
  least_error, most_error  the errors of these predictions.
Nothing is run. What was compiled is kept in `--store`, so that an interrupted
run goes on quickly. With `--nocompile` nothing is compiled, and predicted
memory decides what fits.
"""

import functools
import os

from absl import flags

from experiments.common import list_flags, records, shared_flags
from experiments.common.console import make_console
from experiments.planner import hand_plans, rows as planner_rows
from experiments.residuals import measure, networks

_MODELS = list_flags.define_items(
  "models",
  [
    *("gpt", "gpt_flash", "gpt_unrolled:layers=6"),
    *("gpt_unrolled_flash:layers=6", "resnet50", "unet", "moe", "ssm"),
  ],
  networks.check_model,
  "Models, NAME or NAME:OPTION=VALUE.",
)
_OPTIONS = list_flags.define_names(
  "options", ["exact"], hand_plans.OPTIONS, "Options of plans: exact, rounded."
)
_DEPTHS = (0.1, 0.4, 0.7, 0.95)  # Budgets, from plain to the least by hand.
_TARGET = measure.define_target()
_STORE = shared_flags.define_output(
  "store",
  "File of what was compiled already.",
  default="results/planner_compiled.jsonl",
)
_ALL = flags.DEFINE_bool(
  "all", True, "Whether plans by hand are compiled that decide nothing, too."
)
# A share by which predicted memory may be off.
_MOST_ERROR = 0.15
_COMPILE = flags.DEFINE_bool("compile", True, "Whether plans are compiled.")
_JSON = shared_flags.define_rows()


def main() -> None:
  """Fits every model into every budget; prints a table and writes rows."""
  target, console = _TARGET.value, make_console()
  if _COMPILE.value and (why := measure.explain_refusal(target)):
    console.print(f"Nothing can be compiled for {target}: {why}.")
    return
  store = (
    hand_plans.CompileStore(target, _STORE.value) if _COMPILE.value else None
  )
  file = _RowFile(_JSON.value)
  for model in _MODELS.value:
    for options in _OPTIONS.value:
      hand = hand_plans.HandPlans(model, options, target, store)
      file.begin(f"{model}/{options}/")
      for fit in hand_plans.fit_model(hand, _DEPTHS):
        print(describe_fit(fit), flush=True)
        file.add(make_rows(fit, target))
      if store is not None and _ALL.value:
        file.add(make_error_rows(hand))
  if file.added:
    console.print(planner_rows.memory_table(file.added).to_console())


class _RowFile:
  """Rows of this run, written beside those of other models."""

  def __init__(self, path: str | None):
    self._path = path
    self._kept: list[records.Row] = []
    if path is not None and os.path.exists(path):
      self._kept = records.read_rows(path)
    self.added: list[records.Row] = []

  def begin(self, prefix: str) -> None:
    """Forgets older rows of cases."""
    self._kept = [r for r in self._kept if not r.case.startswith(prefix)]

  def add(self, rows: list[records.Row]) -> None:
    """Adds rows, and writes the file."""
    self.added += rows
    records.write_rows(self._path, [*self._kept, *self.added])


def describe_fit(fit: hand_plans.MemoryFit) -> str:
  """Returns a line about a plan."""
  text = f"{fit.model} {fit.options} {fit.budget_bytes / 1e9:.2f} GB: "
  hand = "none by hand"
  if fit.by_hand:
    hand = (
      f"by hand {1e3 * fit.by_hand.step_s:.1f} ms {fit.by_hand.policy.name}"
    )
  if fit.plan is None:
    return f"{text}no plan, least {fit.least_bytes:.4g}; {hand}"
  return (
    f"{text}{1e3 * fit.plan.step_s:.1f} ms {fit.plan.name}; {hand}; "
    f"{fit.compilations} compiled in {fit.fit_s:.0f} s"
  )


def make_rows(fit: hand_plans.MemoryFit, target: str) -> list[records.Row]:
  """Returns the rows of a plan."""
  case = f"{fit.model}/{fit.options}/{fit.budget_bytes / 1e9:.3g}GB"
  make = functools.partial(_make_row, case, target)
  plan, hand = fit.plan, fit.by_hand
  rows = [
    make("budget_bytes", fit.budget_bytes, "bytes"),
    make("compilations", fit.compilations, "programs"),
    make("fit_s", fit.fit_s, "s"),
    make("by_hand", hand.policy.name if hand else "none", "text"),
    make("plans_by_hand", fit.hand_count, "plans"),
  ]
  if fit.hand_bytes is not None:
    rows.append(make("by_hand_bytes", fit.hand_bytes, "bytes"))
  if plan is None:
    return [*rows, make("least_bytes", fit.least_bytes or 0.0, "bytes")]
  compiled = plan.compiled_bytes
  hand_ms = 1e3 * hand.step_s if hand else None
  rows += [
    make("plan", plan.name, "text"),
    make("step_ms_predicted", 1e3 * plan.step_s, "ms", hand_ms),
    make("device_bytes_predicted", plan.predicted_bytes, "bytes", compiled),
  ]
  if compiled is not None:
    rows.append(make("device_bytes", compiled, "bytes", fit.budget_bytes))
  return rows


def make_error_rows(hand: hand_plans.HandPlans) -> list[records.Row]:
  """Returns rows that say how well memory of plans by hand was predicted."""
  make = functools.partial(
    _make_row, f"{hand.model}/{hand.options}/by hand", hand.target
  )
  errors = [p.device_bytes / hand.find_bytes(p) - 1 for p in hand.plans]
  within = sum(abs(error) <= _MOST_ERROR for error in errors)
  return [
    make("plans_within_15_percent", within, "plans", len(errors)),
    make("least_error", min(errors), "share"),
    make("most_error", max(errors), "share"),
  ]


def _make_row(
  case: str,
  target: str,
  metric: str,
  value: float | str,
  unit: str,
  baseline: float | None = None,
) -> records.Row:
  measured = records.Measured(value, unit)
  machine = f"{target}: compiled or predicted, not run"
  key = ("planner_memory", case, metric)
  return records.make_row(*key, measured, baseline, machine=machine)


if __name__ == "__main__":
  shared_flags.run_main(main)
