"""Times awkward shapes and numbers of workers beside a friendly matrix.

  python -m experiments.codecs.shapes --json=results/codecs_shapes.jsonl

A shape is a tree of arrays and a number of workers (`shape_cases.AWKWARD`).
Beside it, in turns, runs the friendly shape of as many values, on 4 workers.
For each codec:
  encode_ns    encoding the tree, with error memory if the codec has one;
  update_ns    decoding and averaging 2 workers' payloads in an SGD update;
  exchange_ns  an SGD update with the mean of emulated workers' gradients.

The codec `identity` shows what the shape costs XLA: a vector whose length is
odd is updated without vector instructions, with a codec or without.

Times are nanoseconds per value and, for the exchange, per worker, because
emulated workers share the cores. Tables show the median of the ratio to the
friendly shape in the same repeat. Rows in --json are written as they come, and
not measured again on the same machine with the same JAX, unless with --fresh.
"""

import os

import jax
from absl import flags

from experiments.codecs.shape_cases import AWKWARD, CODECS
from experiments.codecs.shape_rows import make_rows
from experiments.codecs.shape_run import METRICS, measure_shapes
from experiments.codecs.shape_tables import summary_table
from experiments.common import records, shared_flags
from experiments.common.console import make_console

_SHAPES = flags.DEFINE_multi_enum(
  "only_shapes",
  list(AWKWARD),
  list(AWKWARD),
  "Shapes to time.",
)
_CODECS = flags.DEFINE_multi_enum(
  "only_codecs",
  list(CODECS),
  list(CODECS),
  "Codecs to time.",
)
_METRICS = flags.DEFINE_multi_enum(
  "only_metrics",
  list(METRICS),
  list(METRICS),
  "What to time.",
)
_REPEATS = flags.DEFINE_integer(
  "repeats", 9, "Interleaved repeats.", allow_override=True
)
_FRESH = flags.DEFINE_bool(
  "fresh", False, "Measure again what is in --json.", allow_override=True
)
_JSON = shared_flags.define_rows()


def main() -> None:
  """Times the shapes, writes rows as they come and prints the table."""
  most = max(awkward.workers for awkward in AWKWARD.values())
  jax.config.update("jax_num_cpu_devices", most)
  path = _JSON.value
  rows = _read_valid_rows(path) if path and not _FRESH.value else []
  done = {(row.case, row.metric.removesuffix("_ns")) for row in rows}
  for result in measure_shapes(
    _SHAPES.value, _CODECS.value, _METRICS.value, _REPEATS.value, done
  ):
    rows += make_rows([result])
    if path:
      records.write_rows(path, rows)
  make_console().print(summary_table(rows).to_console())


def _read_valid_rows(path: str) -> list[records.Row]:
  """Returns the rows that this machine and this JAX wrote, if any."""
  if not os.path.exists(path):
    return []
  here = records.describe_machine(), jax.__version__
  return [r for r in records.read_rows(path) if (r.machine, r.jax) == here]


if __name__ == "__main__":
  shared_flags.run_main(main)
