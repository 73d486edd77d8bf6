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
friendly shape in the same repeat.
"""

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
_JSON = shared_flags.define_rows()


def main() -> None:
  """Times the shapes, prints the table and writes rows."""
  most = max(AWKWARD[name].workers for name in _SHAPES.value)
  jax.config.update("jax_num_cpu_devices", max(4, most))
  results = measure_shapes(
    _SHAPES.value, _CODECS.value, _METRICS.value, _REPEATS.value
  )
  rows = make_rows(results)
  make_console().print(summary_table(rows).to_console())
  if _JSON.value:
    records.write_rows(_JSON.value, rows)


if __name__ == "__main__":
  shared_flags.run_main(main)
