"""Simulates islands, DiLoCo and data parallelism with machines that fail.

  python -m experiments.islands.simulate --json=results/islands_simulated.jsonl

Nothing is trained: a clock of its own counts the steps that remain. Goodput is
the useful steps of all islands, divided by those that they make without
failures, waits and transfers. Machines fail at random, and are back after
`--restart_s`. All schemes send the same payloads, of 4 bits an element.

  islands        commit rounds without those that failed, as the library does;
  diloco         all wait for all, and go back to the last round if one fails;
  data_parallel  sends each step, below the next one, and goes back to the last
                 checkpoint, whose interval is that of Young's formula.

`--link_share` of a round, an island reads the changes of the others. So rounds
are longer with more islands. DiLoCo and data parallelism reduce over a ring.
"""

import math
from typing import NamedTuple

from absl import flags

from experiments.common import console, list_flags, records, shared_flags
from experiments.common.records import Measured, Metrics
from experiments.islands import events, tables
from experiments.islands.events import Outcome, Setting

_LEAST_STEPS = 60  # Of a round.
_PAYLOAD_BYTES = 0.51  # Of an element: `uniform(bits=4)` with its scales.
_SNAPSHOT_BYTES = 8  # Parameters and momentum of the outer optimizer.
_CHECKPOINT_BYTES = 12  # Parameters and Adam's two moments.


class Model(NamedTuple):
  """A model and the link of each island."""

  elements: float
  bits_per_s: float
  step_s: float = 1.0  # Of the median island.


MODELS = {"10m": Model(1e7, 1e8), "1b": Model(1e9, 1e9)}
"""Ten million parameters at 100 Mbit/s, and a billion at 1 Gbit/s."""

_MODELS = list_flags.define_names("models", MODELS, MODELS, "Models to send.")
_ISLANDS = list_flags.define_numbers(
  "islands", (10, 100, 1000), "Numbers of islands.", low=1
)
_HOURS = flags.DEFINE_float("hours", 24.0, "Hours to simulate.", 0.1)
_FAILURES = flags.DEFINE_float(
  "failures", 1.0, "Failures of an island in an hour.", 0.0
)
_RESTART_S = flags.DEFINE_float(
  "restart_s", 120.0, "Seconds until an island that failed runs again.", 0.0
)
_SPREAD = flags.DEFINE_float(
  "spread", 0.1, "Standard deviation of the logarithm of speeds.", 0.0
)
_LINK_SHARE = flags.DEFINE_float(
  "link_share", 0.15, "Part of a round in which others are read.", 0.01, 1.0
)
_SNAPSHOT_ROUNDS = flags.DEFINE_integer(
  "snapshot_rounds", None, "Rounds between two snapshots, else as shipped.", 1
)
_SEED = flags.DEFINE_integer(
  "seed", 0, "Seed of speeds and failures.", allow_override=True
)
_JSON = shared_flags.define_rows()


def make_setting(model: Model, islands: int, link_share: float) -> Setting:
  """Returns the times of a model on islands, with the other defaults."""
  element_s = 8 * model.elements / model.bits_per_s  # Of one byte of each.
  payload_s = _PAYLOAD_BYTES * element_s
  every = math.ceil(islands * payload_s / (link_share * model.step_s))
  every = max(_LEAST_STEPS, every)
  return Setting(
    islands,
    hours=24.0,
    step_s=model.step_s,
    payload_s=payload_s,
    snapshot_s=_SNAPSHOT_BYTES * element_s,
    checkpoint_s=_CHECKPOINT_BYTES * element_s,
    every=every,
    delay=every // 2,
    # As many as a follower has if no change is missing.
    snapshot_rounds=max(
      10, math.ceil(2 * _SNAPSHOT_BYTES / _PAYLOAD_BYTES / islands)
    ),
  )


def _simulate_diloco(setting: Setting) -> Outcome:
  """Simulates rounds that all islands finish together."""
  slowest_s = max(events.draw_step_seconds(setting))
  chunk_s = _LEAST_STEPS * slowest_s + 2 * setting.payload_s
  return events.simulate_lockstep(
    setting, chunk_s, _LEAST_STEPS, 1, setting.snapshot_s
  )


def _simulate_data_parallel(setting: Setting) -> Outcome:
  """Simulates an exchange each step, and checkpoints."""
  slowest_s = max(events.draw_step_seconds(setting))
  step_s = max(slowest_s, 2 * setting.payload_s)
  # Each island writes its part of a checkpoint.
  write_s = setting.checkpoint_s / setting.islands
  failure_s = 3600 / (setting.islands * max(setting.failures, 1e-2))
  steps = max(1, round(math.sqrt(2 * write_s * failure_s) / step_s))
  return events.simulate_lockstep(
    setting, steps * step_s, steps, steps, setting.checkpoint_s
  )


SCHEMES = {
  "islands": events.simulate_islands,
  "diloco": _simulate_diloco,
  "data_parallel": _simulate_data_parallel,
}
"""Simulations by name."""


def measure_scheme(scheme: str, model: Model, setting: Setting) -> Metrics:
  """Simulates a scheme with failures and without; returns its figures."""
  failing = SCHEMES[scheme](setting)
  intact = SCHEMES[scheme](setting._replace(failures=0.0))
  payload_mb = _PAYLOAD_BYTES * model.elements / 1e6
  return {
    "goodput": Measured(failing.goodput, "x"),
    "goodput_without_failures": Measured(intact.goodput, "x"),
    "upload": Measured(failing.upload_payloads * payload_mb, "MB an hour"),
    "download": Measured(failing.download_payloads * payload_mb, "MB an hour"),
    "every": Measured(
      {"islands": setting.every, "diloco": _LEAST_STEPS}.get(scheme, 1), "steps"
    ),
  }


def main() -> None:
  """Simulates the cases, prints the table and writes rows."""
  cases: dict[str, Metrics] = {}
  for name in _MODELS.value:
    for islands in _ISLANDS.value:
      setting = make_setting(MODELS[name], islands, _LINK_SHARE.value)
      setting = setting._replace(
        hours=_HOURS.value,
        failures=_FAILURES.value,
        restart_s=_RESTART_S.value,
        spread=_SPREAD.value,
        snapshot_rounds=_SNAPSHOT_ROUNDS.value or setting.snapshot_rounds,
        seed=_SEED.value,
      )
      for scheme in SCHEMES:
        figures = measure_scheme(scheme, MODELS[name], setting)
        cases[f"{name}/{islands}/{scheme}"] = figures
  rows = records.make_rows("islands_simulated", cases, machine="simulated")
  console.make_console().print(tables.summary_table(rows).to_console())
  records.write_rows(_JSON.value, rows)


if __name__ == "__main__":
  shared_flags.run_main(main)
