"""Trains on workers of unequal speed, and compares how to share the work.

  python -m experiments.hetero --json=hetero.jsonl --plot=hetero.png

Four workers, of which some are slowed by really doing their work 2 or 4 times
over, train a small CNN on digits: `equal` shares, shares of the speeds measured
before training with a plain mean of the workers' gradients
(`uneven_plain_mean`) and with the exact weights (`uneven_weighted`), and shares
that follow the speeds while training runs (`rebalanced`). Data are `shuffled`,
or dealt `by_class`, so that workers see different ones.

Workers are emulated. Where they are more than the machine's cores they would
slow one another, so each is timed alone, in its turn, on one thread; the time
of a step is that of the slowest worker and of the exchange of all. Takes about
4 minutes.
"""

import os

from absl import app, flags

from experiments.common import shared_flags
from experiments.hetero import run
from experiments.hetero.cases import DEALS, SCENARIOS, Settings

_SCENARIOS = flags.DEFINE_list("scenarios", list(SCENARIOS), "Slowdowns.")
_DEALS = flags.DEFINE_list("deals", list(DEALS), "Ways to deal the data.")
_SEEDS = flags.DEFINE_integer("seeds", 3, "How many runs of each.", 1)
_STEPS = flags.DEFINE_integer("steps", Settings.steps, "Of each run.", 1)
_SETTLE = flags.DEFINE_integer(
  "settle", Settings.settle, "Steps that medians leave out after a change.", 0
)
_DRAWS = flags.DEFINE_integer(
  "draws", Settings.draws, "Batches for the moments of gradients.", 2
)
_JSON = shared_flags.define_rows()
_PLOT = shared_flags.define_plot()


def main() -> None:
  """Runs what the flags describe."""
  try:
    settings = Settings(
      scenarios=tuple(_SCENARIOS.value),
      deals=tuple(_DEALS.value),
      seeds=tuple(range(_SEEDS.value)),
      steps=_STEPS.value,
      settle=_SETTLE.value,
      draws=_DRAWS.value,
    )
  except ValueError as error:
    raise app.UsageError(str(error)) from error
  # Before JAX starts: one thread a worker.
  one_thread = "--xla_cpu_multi_thread_eigen=false"
  os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {one_thread}"
  run.run(settings, json=_JSON.value, plot=_PLOT.value)


if __name__ == "__main__":
  shared_flags.run_main(main)
