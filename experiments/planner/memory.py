"""Compares plans of `planner.fit_memory` with plans made by hand.

  JAX_PLATFORMS=cpu python -m experiments.planner.memory \\
    --models=gpt,moe,resnet50 --json=results/fit_memory.jsonl

Models are those of `experiments.models.losses`, with options as in
`gpt:layers=12`. Plans made by hand are the policies of `jax.checkpoint`, around
each block and around the loss, those of the names that the model gives, and
`memory.compress_residuals` by default, by eleven budgets, and (`rounded`) in 8
and 4 bits. Budgets lie between what plain training takes (depth 0) and the
least that a plan by hand takes (depth 1).

Metrics, of the plan of each budget:
  step_ms_predicted       time of the step; baseline: the fastest plan by hand
                          that fits;
  device_bytes_predicted  memory of the step; baseline: compiled;
  device_bytes            likewise, compiled for a GPU that need not be there;
  compilations, fit_s     programs that were compiled, and seconds, in all.
Nothing is run. With `--nocompile` nothing is compiled either, and predicted
memory decides what fits.
"""

import jax
from absl import flags

from experiments.common import records, shared_flags
from experiments.common.console import make_console
from experiments.common.records import Row
from experiments.planner.memory_fits import MemoryFit, fit_model
from experiments.planner.tables import memory_table
from experiments.residuals import measure

_MODELS = flags.DEFINE_list(
  "models",
  [
    "gpt",
    "gpt_flash",
    "gpt_unrolled:layers=6",
    "gpt_unrolled_flash:layers=6",
    "resnet50",
    "unet",
    "moe",
    "ssm",
  ],
  "Models, NAME or NAME:OPTION=VALUE.",
  allow_override=True,
)
_OPTIONS = flags.DEFINE_list(
  "options", ["exact"], "Options of plans: exact, rounded.", allow_override=True
)
_DEPTHS = flags.DEFINE_list(
  "depths",
  ["0.1", "0.4", "0.7", "0.95"],
  "Budgets, from 0 (plain) to 1 (least by hand).",
  allow_override=True,
)
_TARGET = flags.DEFINE_enum(
  "target",
  "h100",
  list(measure.TARGETS),
  "Device to compile for.",
  allow_override=True,
)
_COMPILE = flags.DEFINE_bool("compile", True, "Whether plans are compiled.")
_JSON = shared_flags.define_rows()


def main() -> None:
  """Fits every model into every budget; prints a table and writes rows."""
  target, console = _TARGET.value, make_console()
  if _COMPILE.value and (why := measure.explain_refusal(target)):
    console.print(f"Nothing can be compiled for {target}: {why}.")
    return
  depths = list(map(float, _DEPTHS.value))
  fits: list[MemoryFit] = []
  for model in _MODELS.value:
    for options in _OPTIONS.value:
      for fit in fit_model(
        model, options, depths, target if _COMPILE.value else None
      ):
        print(describe_fit(fit), flush=True)
        fits.append(fit)
        if _JSON.value:
          rows = [row for one in fits for row in make_rows(one, target)]
          records.write_rows(_JSON.value, rows)
  rows = [row for fit in fits for row in make_rows(fit, target)]
  console.print(memory_table(rows).to_console())


def describe_fit(fit: MemoryFit) -> str:
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


def make_rows(fit: MemoryFit, target: str) -> list[Row]:
  """Returns the rows of a plan.

  Args:
    fit: the plan, or the least that any plan takes.
    target: device that it was compiled for.
  """
  case = f"{fit.model}/{fit.options}/{fit.budget_bytes / 1e9:.3g}GB"
  machine = f"{target}: compiled or predicted, not run"

  def make(
    metric: str, value: float | str, unit: str, baseline: float | None = None
  ) -> Row:
    ratio = None
    if baseline and not isinstance(value, str):
      ratio = value / baseline
    key = ("planner_memory", case, metric, value, unit, baseline, ratio)
    return Row(*key, None, machine, jax.__version__)

  plan, hand = fit.plan, fit.by_hand
  rows = [
    make("budget_bytes", fit.budget_bytes, "bytes"),
    make("compilations", fit.compilations, "programs"),
    make("fit_s", fit.fit_s, "s"),
    make("by_hand", hand.policy.name if hand else "none", "text"),
    make("plans_by_hand", fit.hand_count, "plans"),
  ]
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


if __name__ == "__main__":
  shared_flags.run_main(main)
