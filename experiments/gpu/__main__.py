"""Measures all that needs a GPU, in one call of a limited time.

  python -m experiments.gpu --json=results/gpu.jsonl

Jobs, each in processes of its own, one after another:
  transfers   rates of the link to the host, and of packed weights over it;
  steps_X     step time and peak memory of model X under policies of saving;
  check       every implementation of every op, on all arrays;
  speed       every op beside a device copy, XLA, torch and torchao, in the time
              that is left.
Rows are added to --json after each job. A job that is there already is not run
again, unless with --fresh. A job that fails, or for which no time is left, gets
a row that says so, and is run by the next call. Where there is no GPU, --small
runs every job in a small form.
"""

import pathlib
import sys

from absl import flags

from experiments.common import (
  console,
  list_flags,
  records,
  shared_flags,
  signals,
)
from experiments.gpu import jobs

_SECONDS = flags.DEFINE_float(
  "seconds", 450, "Time of all jobs.", 0, allow_override=True
)
_JOBS = list_flags.define_names("jobs", jobs.JOBS, jobs.JOBS, "Names of jobs.")
_SMALL = flags.DEFINE_bool("small", False, "Run small forms of the jobs.")
_FRESH = shared_flags.define_fresh()
_JSON = shared_flags.define_rows()


def main() -> None:
  """Runs the jobs; prints a table and writes rows."""
  # Else the process of a job would keep the GPU after this one has ended.
  signals.exit_on_sigterm()
  path = pathlib.Path(_JSON.value) if _JSON.value else None
  known = [] if _FRESH.value or path is None else jobs.read_known(path)
  rows = known
  for rows in jobs.run_jobs(_JOBS.value, known, _SECONDS.value, _SMALL.value):
    records.write_rows(path, rows)
  console.make_console().print(jobs.jobs_table(rows).to_console())
  if jobs.find_failures(rows):
    sys.exit(1)


if __name__ == "__main__":
  shared_flags.run_main(main)
