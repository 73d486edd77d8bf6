"""Checks generated cases against the stated laws of the library.

  python -m experiments.fuzz --minutes=30 --json=results/fuzz.jsonl

The time is shared as in `run.SHARES`. Every defect is printed with a case
that shows it; its round can be run again alone:

  python -m experiments.fuzz --round=codecs:17

The exit code is 1 if there was a defect.
"""

import os
import sys
from collections.abc import Mapping

import rich.markup
import rich.progress
from absl import flags

from experiments.fuzz import run
from experiments.fuzz.rounds import Defect

# Before JAX starts, here and in the processes that are started: exchanges need
# several workers.
os.environ["XLA_FLAGS"] = (
  os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
)

from experiments.common import list_flags, records, shared_flags
from experiments.common.console import make_console

_MINUTES = flags.DEFINE_float(
  "minutes", 1.0, "Time after which no round starts.", lower_bound=0
)
_SUBJECTS = list_flags.define_names(
  "subjects", run.SUBJECTS, run.SUBJECTS, "Subjects to check."
)
_SEED = flags.DEFINE_integer(
  "seed", 0, "Seed of the first round.", allow_override=True
)
_PROCESSES = flags.DEFINE_integer(
  "processes", os.cpu_count() or 1, "Rounds at the same time.", lower_bound=1
)
_ROUND = list_flags.define_item(
  "round",
  None,
  run.parse_round,
  "One round to run, SUBJECT:SEED, instead of all.",
)
_JSON = shared_flags.define_rows()


def main() -> None:
  """Runs the rounds, prints defects and counts, and writes rows."""
  console = make_console()

  def show(defect: Defect) -> None:
    text = rich.markup.escape(f"{defect.case}\n{defect.detail.rstrip()}")
    console.print(f"[bold]Broken: {rich.markup.escape(defect.law)}[/]\n{text}")

  if _ROUND.value:
    name, seed = _ROUND.value
    found = run.run_guarded(run.SUBJECTS[name], name, seed)
    for defect in found.defects:
      show(defect)
    console.print(f"{found.cases} cases, {len(found.defects)} defects")
    sys.exit(bool(found.defects))

  with rich.progress.Progress(
    rich.progress.TextColumn("{task.description}"),
    rich.progress.TimeElapsedColumn(),
    console=console,
    transient=True,
  ) as progress:
    line = progress.add_task("starting", total=None)

    def report(tallies: Mapping[str, run.Tally], defect: Defect | None) -> None:
      if defect:
        show(defect)
      counts = ", ".join(f"{n} {t.cases:,}" for n, t in tallies.items())
      progress.update(line, description=f"cases: {counts}")

    tallies = run.run_subjects(
      {name: run.SUBJECTS[name] for name in _SUBJECTS.value},
      60 * _MINUTES.value,
      shares=run.SHARES,
      first_seed=_SEED.value,
      processes=_PROCESSES.value,
      report=report,
    )
  rows = run.make_rows(tallies)
  console.print(run.summary_table(rows).to_console())
  records.write_rows(_JSON.value, rows)
  sys.exit(any(tally.defects for tally in tallies.values()))


if __name__ == "__main__":
  shared_flags.run_main(main)
