"""Checks and times the ops of jaxmotion's kernels on this device.

  python -m experiments.kernels --json=results/kernels.jsonl
  python -m experiments.kernels --only=check
  python -m experiments.kernels --compiled

Check: compares every implementation that runs here, jitted, in poisoned memory,
with the reference on the host. --only=check does it on more arrays.

Timing: every implementation, peers that can be imported, and a copy of as many
bytes as the op reads and writes, in interleaved repeats.
  bandwidth           bytes of the op's arguments and outputs, each once, over
                      its time;
  bandwidth_fraction  bandwidth over the copy's;
  speedup             time of the reference over its time.
On a host the copy is numpy's, by one thread; the floor ratio is the op's time
in copies. Arrays that fit a cache are read from the cache, by the copy too.

--compiled: no GPU and no timing. Compiles every op for a GPU and reports
kernels, traffic over the fewest bytes possible, registers, widths of accesses.
"""

import os
import secrets
import sys
import time

import jax
from absl import flags

from experiments import gpu_compile
from experiments.common import list_flags, records, shared_flags
from experiments.common.console import make_console
from experiments.kernels import cases, rows, run, tables

_OPS = list_flags.define_names(
  "ops", [], cases.list_ops(), "Names of ops; all if empty.", least=0
)
_MAX_BYTES = flags.DEFINE_integer(
  "max_bytes", None, "Largest array, bytes; by default what fits the device.", 4
)
_REPEATS = flags.DEFINE_integer(
  "repeats", 9, "Interleaved repeats.", 1, allow_override=True
)
_SECONDS = flags.DEFINE_float(
  "seconds", 420, "Start nothing after that long.", 0, allow_override=True
)
_ONLY = flags.DEFINE_enum(
  "only", None, ["check", "time"], "The part to do; both by default."
)
_SEED = flags.DEFINE_integer(
  "seed", None, "Of the arrays that are checked.", allow_override=True
)
_COMPILED = flags.DEFINE_bool("compiled", False, "Compile for a GPU only.")
_TARGET = flags.DEFINE_enum(
  "target", "H100", list(gpu_compile.GPUS), "Device of --compiled."
)
_JSON = shared_flags.define_rows()


def main() -> None:
  """Checks and times, or compiles; prints tables and writes rows."""
  # Peers need memory too.
  os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
  made, wrong = _compile_ops() if _COMPILED.value else _check_and_time()
  records.write_rows(_JSON.value, made)
  if wrong:
    sys.exit(f"Wrong: {', '.join(wrong)}.")


def _compile_ops() -> tuple[list[records.Row], list[str]]:
  """Returns rows, and the kernels that spill registers."""
  target = _TARGET.value
  gpu_compile.stay_on_host()
  if why := gpu_compile.explain_refusal():
    sys.exit(f"Nothing can be compiled for the {target}: {why}.")
  found = run.compile_all(cases.select_ops(_OPS.value), target)
  made = list(rows.make_compiled_rows(found, gpu_compile.GPUS[target].kind))
  make_console().print(tables.compiled_table(made).to_console())
  wrong = [
    f"{op} by {name} spills registers"
    for op, name, figures in found
    if name != "reference" and not isinstance(figures, str)
    if figures.spill_bytes
  ]
  return made, wrong


def _check_and_time() -> tuple[list[records.Row], list[str]]:
  """Returns rows, and the implementations that make other values."""
  begin, console = time.monotonic(), make_console()
  ops = cases.select_ops(_OPS.value)
  seed = secrets.randbits(32) if _SEED.value is None else _SEED.value
  outcomes = []
  if _ONLY.value != "time":
    outcomes = run.check_all(ops, seed, every_case=_ONLY.value == "check")
    console.print(tables.check_table(outcomes, seed).to_console())
  made = list(rows.make_check_rows(outcomes))
  wrong = {f"{o.op} by {o.implementation}": None for o in outcomes if o.wrong}
  if _ONLY.value != "check":
    on_host = jax.default_backend() == "cpu"
    most = cases.MAX_HOST_BYTES if on_host else max(cases.SIZES)
    left = _SECONDS.value - (time.monotonic() - begin)
    speeds = run.time_all(ops, _MAX_BYTES.value or most, _REPEATS.value, left)
    timed = list(rows.make_speed_rows(speeds))
    for size in sorted({s.size_bytes for s in speeds}):
      table = tables.speed_table(timed, rows.format_size(size))
      console.print(table.to_console())
    made += timed
  return made, list(wrong)


if __name__ == "__main__":
  shared_flags.run_main(main)
