r"""Compares predicted steps with measured ones that no calibration has seen.

  python -m experiments.perfmodel.validate --json=perfmodel_validate.jsonl \
    --plot=perfmodel_validate.png

On each testbed, codecs, collectives and kernels are measured separately, as are
steps without exchange at a few batches and widths. All steps with an exchange,
and steps without at other batches and widths, are then predicted and measured.
The numbers of emulated devices in `--between` are not calibrated at all: they
are predicted from their neighbors.

Emulated devices share the cores of this machine. Hosts are network namespaces
of it (see `experiments.hosts`), with a limited link. Measurements of a testbed
alternate.
"""

import sys

import rich.console
from absl import flags

from experiments.common import files, list_flags, records, shared_flags, signals
from experiments.common.console import JobError, make_console
from experiments.hosts import links
from experiments.hosts.cases import EXCHANGES
from experiments.hosts.processes import HostError
from experiments.perfmodel import tables
from experiments.perfmodel.cases import make_grid, parse_shape
from experiments.perfmodel.plot import plot_validation
from experiments.perfmodel.rows import validation_rows
from experiments.perfmodel.score import make_decisions
from experiments.perfmodel.testbed import Effort, Testbed
from experiments.perfmodel.validation import compare_steps, measure_testbed

_EMULATED = list_flags.define_numbers(
  "emulated", [2, 4], "Numbers of emulated devices.", low=1, least=0
)
_BETWEEN = list_flags.define_numbers(
  "between",
  [3],
  "Numbers of emulated devices without calibration.",
  low=1,
  least=0,
)
_RATES = list_flags.define_items(
  "rates",
  ["100mbit", "1gbit"],
  links.check_rate,
  "Rates of the link of two hosts; or loopback.",
  least=0,
)
_EXCHANGES = list_flags.define_names(
  "exchanges",
  ["none", *EXCHANGES],
  ["none", *EXCHANGES],
  "Exchanges to predict.",
)
_KNOWN_WIDTHS = list_flags.define_numbers(
  "known_widths",
  [512, 1280],
  "Widths of the MLPs that calibrate.",
  low=1,
  least=2,
)
_KNOWN_BATCHES = list_flags.define_numbers(
  "known_batches",
  [8, 32, 128],
  "Examples of a worker in the calibration.",
  low=1,
)
_SHAPES = list_flags.define_items(
  "shapes",
  ["512x64", "768x64", "1280x16"],
  parse_shape,
  "Width x batch of the held-out steps.",
)
_ROUNDS = flags.DEFINE_integer(
  "rounds", 9, "Rounds over all steps.", 1, allow_override=True
)
_STEPS = flags.DEFINE_integer(
  "steps", 2, "Runs of a step per round.", 1, allow_override=True
)
_SIZES = flags.DEFINE_integer(
  "sizes", 6, "Number of sizes of an operation.", 2, allow_override=True
)
_LARGEST = flags.DEFINE_integer(
  "largest",
  1 << 22,
  "Elements of the largest array.",
  1 << 12,
  allow_override=True,
)
_PLATFORMS = shared_flags.define_output(
  "platforms",
  "Folder of platforms: read if there, else written.",
  files.check_folder,
)
_JSON = shared_flags.define_rows()
_PLOT = shared_flags.define_plot()


def main() -> None:
  """Measures and predicts steps, prints the scores, writes rows and plot."""
  _check_testbeds()
  console = make_console()
  grid = make_grid(
    _KNOWN_WIDTHS.value, _KNOWN_BATCHES.value, _SHAPES.value, _EXCHANGES.value
  )
  effort = Effort(_LARGEST.value, _SIZES.value, _ROUNDS.value, _STEPS.value)
  signals.exit_on_sigterm()
  try:
    found = {
      testbed: measure_testbed(
        testbed, is_calibrated, grid, effort, console, _PLATFORMS.value
      )
      for testbed, is_calibrated in _list_testbeds(console).items()
    }
    pairs = compare_steps(grid, found)
  except (HostError, ValueError) as error:
    raise SystemExit(f"Stopped: {error}") from error
  decisions = make_decisions(pairs)
  console.print(tables.step_table(pairs).to_console())
  console.print(tables.decision_table(decisions).to_console())
  console.print(tables.error_table(pairs).to_console())
  rows = validation_rows(pairs, decisions)
  records.write_rows(_JSON.value, rows)
  if _PLOT.value:
    plot_validation(rows, _PLOT.value)


def _check_testbeds() -> None:
  """Raises unless there is a testbed, and neighbors of those between."""
  known, between = set(_EMULATED.value), _BETWEEN.value
  if not known and not between and not _RATES.value:
    raise JobError(
      "`--emulated`, `--between` or `--rates` must name a testbed, got none."
    )
  known -= set(between)
  for count in between:
    if not known or not min(known) < count < max(known):
      raise JobError(
        "`--between` must lie between two numbers of `--emulated`, got"
        f" {count}."
      )


def _list_testbeds(console: rich.console.Console) -> dict[Testbed, bool]:
  """Returns the testbeds of the flags, and whether each is calibrated."""
  # Testbeds that this machine does not permit are left out with a message.
  found = {Testbed(n): True for n in _EMULATED.value}
  found |= {Testbed(n): False for n in _BETWEEN.value}
  rates = list(_RATES.value)
  limited = [rate for rate in rates if rate != "loopback"]
  why = links.explain_refusal() if limited else None
  if why:
    links.enter_user_namespace([sys.executable, *sys.orig_argv[1:]])
    console.print(f"Not measured: {', '.join(limited)}; {why}")
    rates = [rate for rate in rates if rate not in limited]
  return found | {Testbed(2, rate): True for rate in rates}


if __name__ == "__main__":
  shared_flags.run_main(main)
