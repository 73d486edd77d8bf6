"""Interrupts training jobs at random moments and checks how they go on.

  python -m experiments.fuzz.faults --kills=50 --processes=1,2 \
    --json=results/fuzz_faults.jsonl

Jobs of each number of processes are sent signals until `--kills` have been
sent. `--resizes` kills jobs that go on with other workers. `--faults` breaks
disks, folders, clocks and checkpoints of jobs too, `--links` cuts the link
between two hosts, and `--minutes` watches one long job.
A defect is printed with its case, and the exit code is 1.
"""

import pathlib
import signal
import sys
import tempfile

import rich.markup
from absl import flags

from experiments.common import list_flags, records, shared_flags, tables
from experiments.common.console import make_console
from experiments.fuzz import (
  fault_cases,
  fault_jobs,
  fault_kills,
  fault_soak,
  rounds,
)

_SIGNALS = {
  "kill": signal.SIGKILL,
  "term": signal.SIGTERM,
  "int": signal.SIGINT,
  "stop": signal.SIGSTOP,
}
_KILLS = flags.DEFINE_integer(
  "kills", 50, "Signals to jobs of each number of processes; may be 0.", 0
)
_PROCESSES = list_flags.define_numbers(
  "processes", [1, 2], "Numbers of processes of a job.", low=1
)
_CHOSEN = list_flags.define_names(
  "signal", ["kill"], _SIGNALS, "Signals to choose from."
)
_RESIZES = flags.DEFINE_integer(
  "resizes", 0, "Kills of jobs that other numbers of workers continue.", 0
)
_FAULTS = flags.DEFINE_bool(
  "faults", False, "Also break disks, folders, clocks and checkpoints."
)
_LINKS = flags.DEFINE_bool(
  "links", False, "Also cut the link of a job of two hosts; needs root."
)
_MINUTES = flags.DEFINE_float(
  "minutes", 0.0, "Minutes of a job that is watched.", 0, allow_override=True
)
_STEPS = flags.DEFINE_integer(
  "steps", fault_jobs.STEPS, "Steps of a job.", 20, allow_override=True
)
_SEED = flags.DEFINE_integer(
  "seed", 0, "Seed of all choices.", allow_override=True
)
_JSON = shared_flags.define_rows()

_Fact = tuple[str, str, float, str]


def main() -> None:
  """Runs the jobs, prints defects and counts, and writes rows."""
  console = make_console()
  facts: list[_Fact] = []
  defects: list[rounds.Defect] = []
  with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as path:
    folder = pathlib.Path(path)
    for count in _PROCESSES.value:
      if not _KILLS.value:
        break
      rig = fault_jobs.Rig(folder / f"processes-{count}", count, _STEPS.value)
      kills = fault_kills.run_kills(
        rig,
        _KILLS.value,
        _SEED.value,
        [_SIGNALS[name] for name in _CHOSEN.value],
        lambda kills: console.print(f"{kills.sent} sent, {kills.exact} exact"),
      )
      facts += _describe_kills(count, kills)
      defects += kills.defects
    if _RESIZES.value:
      kills = fault_kills.run_resizes(
        folder / "resizes",
        _RESIZES.value,
        _SEED.value,
        steps=_STEPS.value,
        report=lambda kills: console.print(f"{kills.sent} sent"),
      )
      facts.append(("kill_and_resize", "signals", kills.sent, "signals"))
      facts.append(("kill_and_resize", "continued", kills.exact, "signals"))
      facts.append(
        ("kill_and_resize", "defects", len(kills.defects), "defects")
      )
      defects += kills.defects
    if _FAULTS.value:
      one = fault_jobs.Rig(folder / "faults", 1, _STEPS.value)
      parts = fault_jobs.Rig(folder / "parts", 2, _STEPS.value, workers=4)
      for name, rig, faults in (
        ("faults", one, fault_cases.FAULTS),
        ("faults_2_processes", parts, fault_cases.PART_FAULTS),
      ):
        found = fault_cases.run_faults(
          rig, rig.run_straight(), _SEED.value, faults
        )
        facts.append((name, "cases", found.cases, "cases"))
        facts.append((name, "defects", len(found.defects), "defects"))
        defects += found.defects
    if _LINKS.value:
      rig = fault_jobs.Rig(folder / "links", 2, _STEPS.value)
      found, seconds = fault_cases.run_links(rig, rig.run_straight())
      facts.append(("links", "cases", found.cases, "cases"))
      facts.append(("links", "defects", len(found.defects), "defects"))
      facts.append(("links", "end_on_dead_link_s", seconds, "s"))
      defects += found.defects
    if _MINUTES.value:
      soak = fault_soak.run_soak(folder / "soak", _MINUTES.value)
      facts.append(("soak", "samples", soak.round.cases, "samples"))
      facts.append(("soak", "saves", soak.saves, "saves"))
      for metric, grown in soak.growth._asdict().items():
        unit = "KiB" if metric == "memory_kb" else metric
        facts.append(("soak", f"growth_{metric}", grown, unit))
      defects += soak.round.defects
  for defect in defects:
    text = f"Broken: {defect.law}\n{defect.case}\n{defect.detail}"
    console.print(rich.markup.escape(text))
  lines = [
    [case, what, f"{value:g}", unit] for case, what, value, unit in facts
  ]
  table = tables.Table(
    ("case", "metric", "value", "unit"), lines, text_columns=(0, 1)
  )
  console.print(table.to_console())
  rows = [
    records.make_row("fuzz_faults", case, name, records.Measured(value, unit))
    for case, name, value, unit in facts
  ]
  records.write_rows(_JSON.value, rows)
  sys.exit(bool(defects))


def _describe_kills(processes: int, kills: fault_kills.Kills) -> list[_Fact]:
  """Returns the counts of one number of processes."""
  names = "_".join(_CHOSEN.value)
  case = f"{names}_{processes}_processes"
  facts: list[_Fact] = [
    (case, "signals", kills.sent, "signals"),
    (case, "resumed_bit_exact", kills.exact, "signals"),
    (case, "before_a_checkpoint", kills.starting, "signals"),
    (case, "while_writing", kills.writing, "signals"),
    (case, "defects", len(kills.defects), "defects"),
  ]
  if processes > 1:
    facts.append((case, "longest_end_s", kills.longest_s, "s"))
    facts.append((case, "limit_end_s", fault_kills.END_S, "s"))
  return facts


if __name__ == "__main__":
  shared_flags.run_main(main)
