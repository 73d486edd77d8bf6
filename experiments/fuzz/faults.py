"""Interrupts training jobs at random moments and checks how they go on.

  python -m experiments.fuzz.faults --kills=50 --processes=1,2 \
    --json=results/fuzz_faults.jsonl

Jobs of each number of processes are sent signals until `--kills` have been
sent. `--resizes` kills jobs that go on with other workers. `--faults` breaks
disks, folders, clocks and checkpoints of jobs too, `--links` cuts the link
between two hosts, and `--minutes` watches one long job.
A defect is printed with its case, and the exit code is 1.
"""

import signal
import sys
import tempfile
from pathlib import Path

import rich.markup
from absl import flags

from experiments.common import list_flags, records, shared_flags
from experiments.common.console import make_console
from experiments.common.records import Measured, Metrics
from experiments.common.tables import Table
from experiments.fuzz import fault_cases, fault_jobs, fault_kills, fault_soak
from experiments.fuzz.fault_jobs import Rig
from experiments.fuzz.fault_kills import Kills
from experiments.fuzz.rounds import Defect, Round

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


def main() -> None:
  """Runs the jobs, prints defects and counts, and writes rows."""
  console = make_console()
  cases: dict[str, Metrics] = {}
  defects: list[Defect] = []
  with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as path:
    folder = Path(path)
    for count in _PROCESSES.value if _KILLS.value else ():
      rig = Rig(folder / f"processes-{count}", count, _STEPS.value)
      kills = fault_kills.run_kills(
        rig,
        _KILLS.value,
        _SEED.value,
        [_SIGNALS[name] for name in _CHOSEN.value],
        lambda kills: console.print(f"{kills.sent} sent, {kills.exact} exact"),
      )
      name = f"{'_'.join(_CHOSEN.value)}_{count}_processes"
      cases[name] = _describe_kills(count, kills)
      defects += kills.defects
    if _RESIZES.value:
      kills = fault_kills.run_resizes(
        folder / "resizes",
        _RESIZES.value,
        _SEED.value,
        steps=_STEPS.value,
        report=lambda kills: console.print(f"{kills.sent} sent"),
      )
      cases["kill_and_resize"] = {
        "signals": Measured(kills.sent, "signals"),
        "continued": Measured(kills.exact, "signals"),
        "defects": Measured(len(kills.defects), "defects"),
      }
      defects += kills.defects
    if _FAULTS.value:
      one = Rig(folder / "faults", 1, _STEPS.value)
      parts = Rig(folder / "parts", 2, _STEPS.value, workers=4)
      for name, rig, faults in (
        ("faults", one, fault_cases.FAULTS),
        ("faults_2_processes", parts, fault_cases.PART_FAULTS),
      ):
        expected = rig.run_straight()
        found = fault_cases.run_faults(rig, expected, _SEED.value, faults)
        cases[name] = _count_cases(found)
        defects += found.defects
    if _LINKS.value:
      rig = Rig(folder / "links", 2, _STEPS.value)
      found, seconds = fault_cases.run_links(rig, rig.run_straight())
      ended = {"end_on_dead_link_s": Measured(seconds, "s")}
      cases["links"] = _count_cases(found) | ended
      defects += found.defects
    if _MINUTES.value:
      soak = fault_soak.run_soak(folder / "soak", _MINUTES.value)
      units = ("KiB", *soak.growth._fields[1:])
      cases["soak"] = {
        "samples": Measured(soak.round.cases, "samples"),
        "saves": Measured(soak.saves, "saves"),
        **{
          f"growth_{metric}": Measured(grown, unit)
          for (metric, grown), unit in zip(
            soak.growth._asdict().items(), units, strict=True
          )
        },
      }
      defects += soak.round.defects
  for defect in defects:
    text = f"Broken: {defect.law}\n{defect.case}\n{defect.detail}"
    console.print(rich.markup.escape(text))
  rows = records.make_rows("fuzz_faults", cases)
  lines = [[row.case, row.metric, f"{row.value:g}", row.unit] for row in rows]
  table = Table(("case", "metric", "value", "unit"), lines, text_columns=(0, 1))
  console.print(table.to_console())
  records.write_rows(_JSON.value, rows)
  sys.exit(bool(defects))


def _count_cases(found: Round) -> dict[str, Measured]:
  return {
    "cases": Measured(found.cases, "cases"),
    "defects": Measured(len(found.defects), "defects"),
  }


def _describe_kills(processes: int, kills: Kills) -> dict[str, Measured]:
  """Returns the counts of one number of processes."""
  metrics = {
    "signals": Measured(kills.sent, "signals"),
    "resumed_bit_exact": Measured(kills.exact, "signals"),
    "before_a_checkpoint": Measured(kills.starting, "signals"),
    "while_writing": Measured(kills.writing, "signals"),
    "defects": Measured(len(kills.defects), "defects"),
  }
  if processes > 1:
    metrics["longest_end_s"] = Measured(kills.longest_s, "s")
    metrics["limit_end_s"] = Measured(fault_kills.END_S, "s")
  return metrics


if __name__ == "__main__":
  shared_flags.run_main(main)
