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
friendly shape in the same repeat. Rows in --json are written as they come.
Rows of the same machine, sources and JAX are not measured again, unless with
--fresh; rows of what was not asked for stay.
"""

import jax

from experiments.codecs import shape_cases, shape_run, tables
from experiments.common import console, list_flags, records, shared_flags
from experiments.common.records import read_cases

_SHAPES = list_flags.define_names(
  "only_shapes", shape_cases.AWKWARD, shape_cases.AWKWARD, "Shapes to time."
)
_CODECS = list_flags.define_names(
  "only_codecs", shape_cases.CODECS, shape_cases.CODECS, "Codecs to time."
)
_METRICS = list_flags.define_names(
  "only_metrics", shape_run.METRICS, shape_run.METRICS, "What to time."
)
_REPEATS = shared_flags.define_repeats(9)
_FRESH = shared_flags.define_fresh()
_JSON = shared_flags.define_rows()


def main() -> None:
  """Times the shapes, writes rows as they come and prints the table."""
  most = max(awkward.workers for awkward in shape_cases.AWKWARD.values())
  jax.config.update("jax_num_cpu_devices", most)
  path = _JSON.value
  before = [row for rows in read_cases(path).values() for row in rows]
  kept = {(row.case, row.metric.removesuffix("_ns")): row for row in before}
  done = {key for key, row in kept.items() if shape_run.is_current(row)}
  for result in shape_run.measure_shapes(
    _SHAPES.value,
    _CODECS.value,
    _METRICS.value,
    _REPEATS.value,
    () if _FRESH.value else done,
  ):
    (kept[result.case, result.metric],) = shape_run.make_rows([result])
    records.write_rows(path, kept.values())
  rows = list(kept.values())
  console.make_console().print(tables.shape_table(rows).to_console())


if __name__ == "__main__":
  shared_flags.run_main(main)
