"""Compiles an optimizer's update for a GPU and prints where its state is.

  JAX_PLATFORMS=cpu python -m experiments.state \\
    --json=docs/results/state_compiled.jsonl

Compiled, not run: no GPU is needed, but the extra `cuda-compile`. Adam, Adagrad
and Adafactor (with momentum) over equal float32 matrices, with plain state or
with state that `memory.compress_state` encodes (`packed`).

State on the device, one step with everything donated:
  argument_bytes  parameters, gradients and state;
  temp_bytes      temporaries;
  traffic_bytes   bytes that the kernels read and write.
State of Adam in pinned host memory, two steps in a loop:
  temp_bytes      temporaries on the device, the state in transfer included;
                  baseline: the naive loop, which fetches the whole state and
                  puts it back, in no order.
"""

import sys

from absl import flags

from experiments import gpu_compile
from experiments.common import console, records, shared_flags
from experiments.state import run, tables
from experiments.state.rows import make_rows

_LEAVES = flags.DEFINE_integer(
  "leaves", 16, "Number of matrices.", 1, allow_override=True
)
_WIDTH = flags.DEFINE_integer(
  "matrix_width", 2048, "Rows and columns of each.", 1
)
_GPU = flags.DEFINE_enum(
  "gpu",
  "H100",
  list(gpu_compile.GPUS),
  "GPU to compile for.",
  allow_override=True,
)
_JSON = shared_flags.define_rows()


def main() -> None:
  """Compiles the updates, prints the table and writes rows."""
  gpu_compile.stay_on_host()
  if why := gpu_compile.explain_refusal():
    sys.exit(f"Nothing can be compiled for a GPU: {why}.")
  found = run.compile_all(_LEAVES.value, _WIDTH.value, _GPU.value)
  rows = list(make_rows(found, _LEAVES.value, _WIDTH.value))
  console.make_console().print(tables.summary_table(rows).to_console())
  if _JSON.value:
    records.write_rows(_JSON.value, rows)


if __name__ == "__main__":
  shared_flags.run_main(main)
