"""Advises on the codec for each tensor of a configuration.

  python -m experiments.planner --config=configs/digits.py \
    --platform=ethernet_1gbit --json=advice.jsonl

The platform is a built-in one of `jaxmotion.perfmodel`, by its name, or a JSON
file such as `experiments.perfmodel.calibrate` writes. It gets as many workers
as the configuration has. All times are predicted: only one backward pass runs,
and the codecs' errors are measured on its gradient. With `--nogradients`
nothing runs, and errors are the codecs' own bounds.
"""

from absl import flags

from experiments.common import records, shared_flags
from experiments.common.console import make_console
from experiments.planner import rows as planner_rows, run

_CONFIG = shared_flags.define_config(
  "digits", "Configuration of the training step."
)
_PLATFORM = flags.DEFINE_string(
  "platform",
  "ethernet_1gbit",
  "Name of a platform, or its JSON file.",
  allow_override=True,
)
_MESH_AXIS = flags.DEFINE_string(
  "mesh_axis",
  None,
  "Mesh axis of the workers; by default the platform's only one.",
  allow_override=True,
)
_BUDGET = flags.DEFINE_float(
  "accuracy_budget", 0.1, "Greatest relative error of the gradient."
)
_GRADIENTS = flags.DEFINE_bool(
  "gradients", True, "Whether errors are measured on a gradient."
)
_JSON = shared_flags.define_rows()


def main() -> None:
  """Plans the exchange, prints the plan and writes rows."""
  plan = run.make_plan(
    _CONFIG.value,
    run.load_platform(_PLATFORM.value),
    mesh_axis=_MESH_AXIS.value,
    accuracy_budget=_BUDGET.value,
    gradients=_GRADIENTS.value,
  )
  console = make_console()
  console.print(planner_rows.tensor_table(plan).to_console())
  console.print(planner_rows.codec_table(plan).to_console())
  console.print(
    f"{_CONFIG.value.experiment} on {plan.platform.name}, predicted"
  )
  console.print(plan.reason)
  codec = f"codec: {plan.codec!r}, method: {plan.method!r}"
  console.print(codec, markup=False)
  if _JSON.value:
    rows = planner_rows.make_rows(_CONFIG.value.experiment, plan)
    records.write_rows(_JSON.value, rows)


if __name__ == "__main__":
  shared_flags.run_main(main)
