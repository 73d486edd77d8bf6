"""Trains on workers of unequal speed and compares ways to share the work.

  python -m experiments.hetero --json=hetero.jsonl --plot=hetero.png

Four workers train a small CNN on digits; slowed workers really do their work 2
or 4 times. The cases are `equal` shares; shares by the speeds measured before
training, with a plain mean of the workers' gradients (`uneven_plain_mean`) or
with exact weights (`uneven_weighted`); and shares that follow the speeds during
training (`rebalanced`). Data are `shuffled`, or dealt `by_class`, so that
workers see different classes.

Workers are emulated. More workers than cores would slow one another, so each
worker is timed alone, in turn, on one thread. The time of a step is that of the
slowest worker plus that of the exchange. Takes about 4 minutes.
"""

import os

from absl import flags

from experiments.common import list_flags, shared_flags
from experiments.hetero import cases, run
from experiments.hetero.cases import Settings

_SCENARIOS = list_flags.define_names(
  "scenarios", cases.SCENARIOS, cases.SCENARIOS, "Names of slowdowns."
)
_DEALS = list_flags.define_names(
  "deals", cases.DEALS, cases.DEALS, "Ways to deal the data."
)
_SEEDS = flags.DEFINE_integer("seeds", 3, "Number of runs of each case.", 1)
_STEPS = flags.DEFINE_integer("steps", Settings.steps, "Steps of each run.", 1)
_JSON = shared_flags.define_rows()
_PLOT = shared_flags.define_plot()


def main() -> None:
  """Runs the experiment that the flags describe."""
  settings = Settings(
    scenarios=tuple(_SCENARIOS.value),
    deals=tuple(_DEALS.value),
    seeds=tuple(range(_SEEDS.value)),
    steps=_STEPS.value,
  )
  # Before JAX starts: each worker runs on one thread.
  one_thread = "--xla_cpu_multi_thread_eigen=false"
  os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {one_thread}"
  run.run_experiment(settings, json=_JSON.value, plot=_PLOT.value)


if __name__ == "__main__":
  shared_flags.run_main(main)
