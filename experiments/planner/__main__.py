"""Says which codec each tensor of a configuration should travel by, if any.

  python -m experiments.planner --config=configs/digits.py \
    --platform=ethernet_1gbit --json=advice.jsonl

The platform is one that comes with `jaxmotion.perfmodel`, by its name, or a
JSON file that `experiments.perfmodel.calibrate` or a person wrote. It gets as
many workers as the configuration has. All times are predicted: nothing runs but
one backward pass, on whose gradient the codecs' errors are measured; with
`--nogradients` not even that, and errors are what the codecs state of any.
"""

from absl import flags

from experiments.common import records, shared_flags
from experiments.common.console import make_console
from experiments.planner import run

_CONFIG = shared_flags.define_config("digits", "What is trained.")
_PLATFORM = flags.DEFINE_string(
  "platform",
  "ethernet_1gbit",
  "Name of a platform, or its JSON file.",
  allow_override=True,
)
_MESH_AXIS = flags.DEFINE_string(
  "mesh_axis", None, "Of the workers; the only one.", allow_override=True
)
_BUDGET = flags.DEFINE_float(
  "accuracy_budget", 0.1, "Greatest relative error of the gradient."
)
_GRADIENTS = flags.DEFINE_bool(
  "gradients", True, "Measure errors on a gradient."
)
_JSON = shared_flags.define_rows()


def main() -> None:
  """Prints the plan that the flags ask for, and writes its rows."""
  plan = run.make_plan(
    _CONFIG.value,
    run.load_platform(_PLATFORM.value),
    mesh_axis=_MESH_AXIS.value,
    accuracy_budget=_BUDGET.value,
    gradients=_GRADIENTS.value,
  )
  console = make_console()
  for table in run.make_tables(plan):
    console.print(table)
  console.print(
    f"{_CONFIG.value.experiment} on {plan.platform.name}, predicted"
  )
  console.print(plan.reason)
  codec = f"codec: {plan.codec!r}, method: {plan.method!r}"
  console.print(codec, markup=False)
  if _JSON.value:
    rows = run.make_rows(_CONFIG.value.experiment, plan)
    records.write_rows(_JSON.value, rows)


if __name__ == "__main__":
  shared_flags.run_main(main)
