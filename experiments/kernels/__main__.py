"""Checks and times the ops of jaxmotion's kernels on this device.

  python -m experiments.kernels --json=docs/results/bench_kernels.jsonl
  python -m experiments.kernels --check
  python -m experiments.kernels --compiled

Check: every implementation that runs here, jitted, into poisoned memory,
against the reference on the host. With --check on more arrays, and no more.

Timing: every implementation, peers that can be imported, and a copy of as many
bytes as the op reads and writes, in interleaved repeats.
  bandwidth_fraction  bytes of the op's arguments and outputs, each once, over
                      its time; ratio: to the copy's;
  speedup             the same; ratio: to the reference's.
On a host the copy is numpy's, by one thread; the floor ratio is the op's time
in copies. What fits a cache is read from there, by the copy too.

--compiled: no GPU and no timing. What XLA makes of every op for one: kernels,
traffic over the fewest bytes possible, registers, widths of accesses.
"""

import os
import secrets
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import jax
import rich.progress
from absl import flags

from experiments import gpu_compile
from experiments.common import records, shared_flags
from experiments.common.console import make_console
from experiments.kernels import (
  check as kernels_check,
  compiled,
  op_table,
  report,
  speed,
)
from experiments.kernels.ops import IMPLEMENTATIONS, Op, shape_of

T = TypeVar("T")

# Bytes of the float32 array; the decisive ones first, in case time runs out.
_SIZES = (1 << 28, 1 << 31, 1 << 20, 1 << 16, 1 << 24)
_HOST_MOST = 1 << 28
_COMPILED_BYTES = 1 << 26

_OPS = flags.DEFINE_list("ops", [], "Names of ops; all if empty.")
_MAX_BYTES = flags.DEFINE_integer(
  "max_bytes", None, "Largest array, bytes; by default what fits the device."
)
_REPEATS = flags.DEFINE_integer(
  "repeats", 9, "Interleaved repeats.", allow_override=True
)
_SECONDS = flags.DEFINE_float("seconds", 420, "Start nothing after that long.")
_CHECK = flags.DEFINE_bool("check", False, "Check only.")
_SEED = flags.DEFINE_integer("seed", None, "Of the arrays that are checked.")
_COMPILED = flags.DEFINE_bool("compiled", False, "Compile for a GPU only.")
_GPU = flags.DEFINE_enum(
  "gpu", "H100", list(gpu_compile.GPUS), "Of --compiled."
)
_JSON = shared_flags.define_rows()


def selected(names: Sequence[str]) -> list[Op]:
  """Returns the ops of these names; all if there are none.

  Raises:
    ValueError: there is no such op.
  """
  table = op_table.table()
  for name in names:
    if name not in table:
      raise ValueError(
        f"`ops` must be some of {', '.join(table)}, got {name!r}."
      )
  return [table[name] for name in names or table]


def time_all(
  ops: Sequence[Op], max_bytes: int, repeats: int, seconds: float
) -> list[speed.Speed]:
  """Times ops on all sizes up to `max_bytes`.

  Args:
    ops: to be timed.
    max_bytes: of the float32 array that an op starts from.
    repeats: interleaved repeats.
    seconds: nothing is started after that long; what is left is said.
  """
  end = time.monotonic() + seconds
  speeds: list[speed.Speed] = []
  for size in (size for size in _SIZES if size <= max_bytes):
    title, shape = report.size_name(size), shape_of(size)
    like = jax.ShapeDtypeStruct(shape, "float32")
    prepare = lambda op, like=like: speed.prepare(op, like)
    if time.monotonic() < end:
      x = jax.random.normal(jax.random.key(0), shape)
      prepared = _threads(prepare, ops, f"compile {title}")
      for each in _track(prepared, f"time {title}", len(prepared)):
        if time.monotonic() < end:
          speeds += speed.time_op(each, x, repeats)
    done = {(s.op, s.size_bytes) for s in speeds}
    speeds += [
      speed.Speed(op.name, size, name, reason="no time left")
      for op in ops
      if (op.name, size) not in done
      for name in speed.implementations()
    ]
  return speeds


def check_all(
  ops: Sequence[Op], seed: int, every_case: bool
) -> list[kernels_check.Outcome]:
  """Checks every implementation that runs here."""
  names = speed.implementations()
  check = lambda op: list(kernels_check.check(op, names, seed, every_case))
  return [o for found in _threads(check, ops, "check") for o in found]


def compile_all(
  ops: Sequence[Op], gpu: str
) -> list[tuple[str, str, compiled.Figures | str]]:
  """Compiles every implementation of ops for a GPU that is not there."""

  def one(job: tuple[Op, str]) -> compiled.Figures | str:
    try:
      return compiled.figures(*job, gpu, _COMPILED_BYTES)
    except NotImplementedError as reason:
      return str(reason)

  jobs = [(op, name) for op in ops for name in IMPLEMENTATIONS]
  found = _threads(one, jobs, "compile")
  return [
    (op.name, name, figures)
    for (op, name), figures in zip(jobs, found, strict=True)
  ]


def _threads(fn: Callable[..., T], jobs: Sequence, description: str) -> list[T]:
  """Runs jobs that compile more than they compute."""
  with ThreadPoolExecutor(os.cpu_count()) as threads:
    return list(_track(threads.map(fn, jobs), description, len(jobs)))


def _track(jobs: Iterable, description: str, total: int) -> Iterable:
  # Drawn between jobs: a thread that redraws would be part of what is timed.
  return rich.progress.track(jobs, description, total, auto_refresh=False)


def main() -> None:
  """Checks and times, or compiles; prints tables and writes rows."""
  # Peers need memory too.
  os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
  rows, wrong = _compile() if _COMPILED.value else _check_and_time()
  if _JSON.value:
    records.write_rows(_JSON.value, rows)
  if wrong:
    sys.exit(f"Wrong: {', '.join(wrong)}.")


def _compile() -> tuple[list[records.Row], list[str]]:
  """Returns rows, and the kernels that are not as they should be."""
  gpu_compile.stay_on_the_host()
  if why := gpu_compile.refusal():
    sys.exit(f"Nothing can be compiled for a GPU: {why}.")
  found = compile_all(selected(_OPS.value), _GPU.value)
  kind = gpu_compile.GPUS[_GPU.value].kind
  make_console().print(report.compiled_table(found, kind))
  wrong = [
    f"{op} by {name} spills registers"
    for op, name, figures in found
    if name != "reference" and not isinstance(figures, str)
    if figures.spill_bytes
  ]
  return list(report.compiled_rows(found, kind)), wrong


def _check_and_time() -> tuple[list[records.Row], list[str]]:
  """Returns rows, and the implementations that make other values."""
  begin, console = time.monotonic(), make_console()
  ops = selected(_OPS.value)
  seed = secrets.randbits(32) if _SEED.value is None else _SEED.value
  outcomes = check_all(ops, seed, _CHECK.value)
  console.print(report.check_table(outcomes, seed))
  rows = list(report.check_rows(outcomes))
  wrong = {f"{o.op} by {o.implementation}": None for o in outcomes if o.wrong}
  if not _CHECK.value:
    on_host = jax.default_backend() == "cpu"
    most = _MAX_BYTES.value or (_HOST_MOST if on_host else max(_SIZES))
    left = _SECONDS.value - (time.monotonic() - begin)
    speeds = time_all(ops, most, _REPEATS.value, left)
    for size in sorted({s.size_bytes for s in speeds}):
      console.print(report.speed_table(speeds, size))
    rows += report.speed_rows(speeds)
  return rows, list(wrong)


if __name__ == "__main__":
  shared_flags.run_main(main)
