"""Times codecs on this machine against one numpy copy of the same array.

  python -m experiments.codecs --json=results/codecs.jsonl

One line a codec:
  encode_copies  encoding a matrix, in copies;
  update_ratio   decoding and averaging 2 workers' payloads of the matrix inside
                 an SGD update, in updates whose gradient needs no decoding;
  vector_ratio   the same for a vector, whose blocks follow no rows;
  leaves64_ratio encoding 64 leaves, in encodings of one leaf of the same size;
                 so for each count in --leaves.
The row of each ratio is followed by one of its milliseconds, such as encode_ms.

Repeats are interleaved; numbers are medians of ratios within a repeat. Outputs
go to donated buffers, as in a training loop, because pages that are touched for
the first time cost more than the codec. The copy has such a buffer too.
"""

from experiments.codecs import run, tables
from experiments.codecs.run import make_rows
from experiments.common import console, list_flags, records, shared_flags

_ELEMENTS, _COLUMNS = 1 << 24, 4096  # Floats to encode, in rows of so many.
_LEAVES = list_flags.define_numbers(
  "leaves", [64, 256], "Numbers of leaves of a tree.", low=1
)
_REPEATS = shared_flags.define_repeats(9)
_JSON = shared_flags.define_rows()


def main() -> None:
  """Measures the codecs, prints the table and writes rows."""
  results = run.measure_codecs(
    _ELEMENTS, _COLUMNS, _LEAVES.value, _REPEATS.value
  )
  rows = make_rows(results)
  console.make_console().print(
    tables.summary_table(rows, show_noise=True).to_console()
  )
  records.write_rows(_JSON.value, rows)


if __name__ == "__main__":
  shared_flags.run_main(main)
