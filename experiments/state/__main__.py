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
from experiments.state import run

_LEAVES, _WIDTH = 16, 2048  # Matrices; rows and columns of each.
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
  found = run.compile_all(_LEAVES, _WIDTH, _GPU.value)
  rows = list(run.make_rows(found, _LEAVES, _WIDTH))
  console.make_console().print(run.summary_table(rows).to_console())
  records.write_rows(_JSON.value, rows)


if __name__ == "__main__":
  shared_flags.run_main(main)
