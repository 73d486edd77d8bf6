"""Measures a few costs of this commit and adds them to those of earlier ones.

  python -m experiments.history --json=docs/results/history.jsonl

  import_ratio   a fresh process that imports jaxmotion, in one of optax;
  trace_ratio    CPU time to trace a step of 2 emulated workers, in that of the
                 step that exchanges fp32, in turns;
  compile_ratio  tracing and compiling it, in that of the fp32 step;
  wire_ratio     bytes that fp32 sends, in those of the exchange;
  temp_ratio     temporaries of the compiled step, in those with fp32.

The last two depend on no clock. Cases that end with a number are of a network
of so many arrays, all others of one of three. `experiments.codecs` and
`experiments.hosts` time encodings and steps, on a machine that does nothing
else. A commit that is measured again replaces its rows.
"""

import datetime
import itertools
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
from absl import flags

import jaxmotion
from experiments.common import console, records, shared_flags, tables
from experiments.common.console import JobError
from experiments.common.records import Measured, Row
from experiments.common.tables import Table
from jaxmotion import codecs, wire

_COMMIT = flags.DEFINE_string("commit", None, "Commit; that of git by default.")
_REPEATS = shared_flags.define_repeats(5)
_JSON = shared_flags.define_rows()

_IMPORTS = {
  "optax": "import optax",
  "package": "import jaxmotion",
  "exchange": "import optax, jaxmotion; jaxmotion.exchange",
}
_CODECS = {
  "int8": codecs.uniform(bits=8),
  "int4_feedback": codecs.feedback(codecs.uniform(bits=4)),
  "sign_feedback": codecs.feedback(codecs.sign()),
  "topk1_feedback": codecs.feedback(codecs.topk(density=0.01)),
}
_COLUMNS = 6  # Commits in the table.
_WIDTHS = {"": (784, 512, 512, 10), "_148": (128,) * 149}
"""Widths of the layers, by the end of a case's name."""
_WORKERS = 2

Times = dict[str, list[float]]


def time_imports(repeats: int) -> Times:
  """Returns the seconds of fresh processes, by what they import."""
  seconds: Times = {case: [] for case in _IMPORTS}
  for _ in range(repeats):
    for case, code in _IMPORTS.items():
      begin = time.perf_counter()
      subprocess.run([sys.executable, "-c", code], check=True, env=os.environ)
      seconds[case].append(time.perf_counter() - begin)
  return seconds


def measure_steps(
  repeats: int, suffix: str
) -> tuple[Times, Times, Times, Times]:
  """Returns seconds to trace and compile, and bytes sent and of temporaries."""
  mesh, widths = jax.make_mesh((_WORKERS,), ("data",)), _WIDTHS[suffix]
  batch = jax.ShapeDtypeStruct((64, widths[0]), "float32")
  first = [
    jax.ShapeDtypeStruct(pair, "float32") for pair in itertools.pairwise(widths)
  ]

  def loss_fn(params: list[Any], x: Any) -> Any:
    for w in params:
      x = jax.nn.relu(x @ w)
    return jnp.mean(x)

  cases = {
    f"{name}{suffix}": codec
    for name, codec in ({"fp32": None} | _CODECS).items()
  }
  trace_s: Times = {case: [] for case in cases}
  compile_s: Times = {case: [] for case in cases}
  sent, temporaries = dict(compile_s), dict(compile_s)
  for _ in range(repeats):
    for case, codec in cases.items():
      tx = optax.chain(jaxmotion.exchange("data", codec), optax.sgd(0.1))
      step: Any
      init, step = jaxmotion.make_train_step(loss_fn, tx, mesh)
      state = jax.eval_shape(init, first)
      begin, begin_cpu = time.perf_counter(), time.process_time()
      lowered = step.lower(state, batch)
      trace_s[case].append(time.process_time() - begin_cpu)
      compiled = lowered.compile()
      compile_s[case].append(time.perf_counter() - begin)
      temp_bytes = compiled.memory_analysis().temp_size_in_bytes
      temporaries[case] = [float(temp_bytes)]
      sent[case] = [wire.compiled_bytes(compiled).total_bytes]
  return trace_s, compile_s, sent, temporaries


def make_rows(
  commit: str, found: Sequence[tuple[str, str, Times]]
) -> list[Row]:
  """Returns a row for each ratio to the baseline of its turn."""
  date = datetime.datetime.now(datetime.UTC).date()
  rows = []
  for metric, baseline, times in found:
    for case, own in times.items():
      if case == baseline:
        continue
      ratios = [a / b for a, b in zip(own, times[baseline], strict=True)]
      noise = records.find_spread(ratios)
      ratio = Measured(statistics.median(ratios), "x", noise)
      name = f"history_{date}_{commit}"
      rows.append(records.make_row(name, case, metric, ratio))
  return rows


def summary_table(rows: Sequence[Row]) -> Table:
  """Returns a line for each ratio, and a column for each late commit."""
  commits = list(dict.fromkeys(row.experiment for row in rows))[-_COLUMNS:]
  lines = []
  for metric, case in dict.fromkeys((row.metric, row.case) for row in rows):
    own = {
      row.experiment: row
      for row in rows
      if (row.metric, row.case) == (metric, case)
    }
    cells = [tables.format_noise(own[c]) if c in own else "" for c in commits]
    lines.append([metric, case, *cells])
  names = [commit.removeprefix("history_") for commit in commits]
  header = ("ratio", "case", *(name.replace("_", " ") for name in names))
  return Table(header, lines, text_columns=(0, 1))


def _find_commit() -> str:
  """Returns the short name of the commit that is checked out."""
  command = ["git", "rev-parse", "--short", "HEAD"]
  done = subprocess.run(command, capture_output=True, text=True)
  if done.returncode:
    raise JobError("`--commit` must be given where git knows none.")
  return done.stdout.strip()


def main() -> None:
  """Measures, prints the table of all commits, and writes their rows."""
  # Of CPUs alone: other devices are there in their number.
  jax.config.update("jax_num_cpu_devices", _WORKERS)
  commit = _COMMIT.value or _find_commit()
  known: list[Row] = []
  if _JSON.value and os.path.exists(_JSON.value):
    known = records.read_rows(_JSON.value)
  repeats = _REPEATS.value
  found = [("import_ratio", "optax", time_imports(repeats))]
  for suffix in _WIDTHS:
    trace_s, compile_s, sent, temporaries = measure_steps(repeats, suffix)
    saved = {case: [1 / v for v in values] for case, values in sent.items()}
    baseline = f"fp32{suffix}"
    found += [
      ("trace_ratio", baseline, trace_s),
      ("compile_ratio", baseline, compile_s),
      ("wire_ratio", baseline, saved),
      ("temp_ratio", baseline, temporaries),
    ]
  rows = make_rows(commit, found)
  rows = [r for r in known if not r.experiment.endswith(f"_{commit}")] + rows
  console.make_console().print(summary_table(rows).to_console())
  records.write_rows(_JSON.value, rows)


if __name__ == "__main__":
  shared_flags.run_main(main)
