"""Jobs of a call, which run in processes and share its time; tables."""

import functools
import pathlib
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

from experiments.common import console, files, records, tables
from experiments.kernels import cases

SECONDS = "job_seconds"
"""Metric of the seconds that a job took; text says why it has no rows."""

_FAILED, _NO_TIME = "failed", "not measured"
_MIN_SECONDS = 5.0

_MODELS = (
  *("gpt", "resnet50", "llama", "encoder_decoder", "vision:layers=3"),
  *("convnext:blocks=1", "graph:layers=3", "ssm", "unet", "lstm"),
)
_STEPS = {f"steps_{model.split(':')[0]}": model for model in _MODELS}
JOBS = {
  "transfers": ("experiments.gpu.transfers",),
  **{
    name: ("experiments.residuals.steps", f"--model={model}")
    for name, model in _STEPS.items()
  },
  "check": ("experiments.kernels", "--only=check"),
  "speed": ("experiments.kernels", "--only=time"),
}
"""Module and flags of each job."""
_SMALL_FLAGS = {
  "check": ("--only=check", "--ops=int8"),
  "transfers": ("--max_bytes=65536", "--repeats=2"),
  **{
    name: ("--model=mlp_gelu:blocks=2:width=8:rows=4", "--repeats=2")
    for name in _STEPS
  },
  "speed": ("--only=time", "--ops=int8", "--max_bytes=65536", "--repeats=2"),
}
"""Flags of each job's small form."""
_TAKES_SECONDS = ("speed",)
# Tracing keeps one core of a process busy: the ops are dealt to processes.
_CHECKS = 12


def read_known(path: pathlib.Path) -> list[records.Row]:
  """Returns the rows of calls before; none if there is no file."""
  try:
    return records.read_rows(path)
  except files.MissingFileError:
    return []


def find_failures(rows: Sequence[records.Row]) -> list[tuple[str, str]]:
  """Returns the name of each job that has no rows, and why."""
  return [
    (row.case, row.value)
    for row in rows
    if row.metric == SECONDS and isinstance(row.value, str)
  ]


def run_jobs(
  names: Sequence[str],
  known: Sequence[records.Row],
  seconds: float,
  small: bool,
) -> Iterator[list[records.Row]]:
  """Runs jobs one after another; yields all rows after each."""
  rows, end = list(known), time.monotonic() + seconds
  ended = {row.case for row in known if row.metric == SECONDS}
  failed = {name for name, _ in find_failures(known)}
  for name in names:
    if name not in ended - failed:
      console.print_notice(f"{name}: {end - time.monotonic():.0f} s are left.")
      rows = [row for row in rows if not _belongs_to(row, name)]
      rows += _run_job(name, end - time.monotonic(), small)
      yield rows


def _belongs_to(row: records.Row, name: str) -> bool:
  """Tells whether a row is of a job, or says how that job ended."""
  is_end = row.metric == SECONDS and row.case == name
  return is_end or row.experiment == f"gpu_{name}"


def _run_job(name: str, seconds: float, small: bool) -> list[records.Row]:
  """Runs a job; returns its rows and the row of its time, or of its failure."""
  if seconds < _MIN_SECONDS:
    return [_make_row(name, f"{_NO_TIME}: no time left")]
  module, *usual = JOBS[name]
  options = [*(_SMALL_FLAGS[name] if small else usual)]
  if name in _TAKES_SECONDS:
    options.append(f"--seconds={0.8 * seconds:.0f}")
  parts = [options]
  if name == "check" and not small:
    ops = list(cases.list_ops())
    deals = [",".join(ops[i::_CHECKS]) for i in range(_CHECKS)]
    parts = [[*options, f"--ops={deal}"] for deal in deals]
  begin = time.monotonic()
  with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor() as threads:
    paths = [pathlib.Path(folder) / f"{i}.jsonl" for i in range(len(parts))]
    commands = [
      [sys.executable, "-m", module, *part, f"--json={path}"]
      for part, path in zip(parts, paths, strict=True)
    ]
    run = functools.partial(_run_command, seconds=seconds)
    failures = [why for why in threads.map(run, commands) if why is not None]
    rows = [row for p in paths if p.exists() for row in records.read_rows(p)]
  rows = [row._replace(experiment=f"gpu_{name}") for row in rows]
  if failures:
    return [*rows, _make_row(name, f"{_FAILED}: {'; '.join(failures)}")]
  return [*rows, _make_row(name, time.monotonic() - begin, rows)]


def _run_command(command: Sequence[str], seconds: float) -> str | None:
  """Runs a command; returns why it failed, or None."""
  try:
    done = subprocess.run(
      command, stderr=subprocess.PIPE, text=True, timeout=seconds
    )
  except subprocess.TimeoutExpired:
    return f"no end after {seconds:.0f} s"
  return _last_line(done.stderr) if done.returncode else None


def _last_line(text: str) -> str:
  """Returns the last line that is not JAX's note about its tracebacks."""
  notes = ("-----", "For simplicity, JAX")
  lines = [line for line in text.splitlines() if line.strip()]
  lines = [line for line in lines if not line.startswith(notes)]
  return lines[-1] if lines else "it said nothing"


def _make_row(
  name: str, value: float | str, rows: Sequence[records.Row] = ()
) -> records.Row:
  # This process must not start JAX, which would take the GPU's memory.
  machine = rows[0].machine if rows else "unknown"
  version = rows[0].jax if rows else "unknown"
  key = ("gpu_jobs", name, SECONDS, records.Measured(value, "s"))
  return records.make_row(*key, machine=machine, version=version)


def jobs_table(rows: Sequence[records.Row]) -> tables.Table:
  """Returns the seconds and the number of rows of each job."""
  counts = Counter(row.experiment for row in rows)
  lines = [
    (
      row.case,
      row.value if isinstance(row.value, str) else f"{row.value:.0f}",
      str(counts[f"gpu_{row.case}"]),
    )
    for row in rows
    if row.metric == SECONDS
  ]
  return tables.Table(("job", "seconds", "rows"), lines, text_columns=(0, 1))
