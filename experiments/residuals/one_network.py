"""What training a network takes of a device's memory, in every mode.

  JAX_PLATFORMS=cpu python -m experiments.residuals.one_network \\
    --json=memory.jsonl

Compiled for a GPU that need not be there (the extra `cuda-compile`):
  temp_bytes       on the device, beside arguments and results; baseline: plain;
  host_temp_bytes  on the host;
  argument_bytes   parameters and the batch; result_bytes: gradients, if any;
  device_bytes     all three on the device.
The compiler spends what memory it is told of, so no two figures compare unless
that is the same; it is named in `machine`. It knows of no workspace that cuDNN
would ask for. On the target `cpu` only what a network keeps in loops counts:
XLA orders the rest for speed, not for memory.

Predicted: flops (with what is computed again), traffic_bytes_predicted,
step_ms_predicted. Measured where this machine has a GPU, in a process of its
own for each: peak_bytes_in_use and step_ms.
"""

from absl import flags

from experiments.common import shared_flags
from experiments.common.console import make_console
from experiments.residuals import cases, measure, points, report

_NETWORKS = flags.DEFINE_list(
  "networks",
  ["resnet152:16", "gpt:8"],
  "Networks and batches, NAME:BATCH.",
  allow_override=True,
)
_MODES = flags.DEFINE_list(
  "modes", list(cases.MODES), "Of training.", allow_override=True
)
_TARGET = flags.DEFINE_enum(
  "target",
  "h100",
  list(measure.TARGETS),
  "To compile for.",
  allow_override=True,
)
_MEMORY = flags.DEFINE_float(
  "memory_gib",
  None,
  "Memory that the compiler is told of; by default what the GPU comes with.",
  allow_override=True,
)
_JSON = shared_flags.define_rows()
_PLOT = shared_flags.define_plot()


def main() -> None:
  """Compiles, predicts, measures; prints a table and writes rows."""
  target, console = _TARGET.value, make_console()
  wanted = points.parse(_NETWORKS.value)
  if why := measure.refusal(target):
    console.print(f"Nothing can be compiled for {target}: {why}.")
    return
  rows = points.find_all(
    wanted,
    _MODES.value,
    target,
    "residuals_one_network",
    _JSON.value,
    _MEMORY.value,
  )
  console.print(report.table(rows))
  if _PLOT.value:
    report.save_plot(rows, _PLOT.value)


if __name__ == "__main__":
  shared_flags.run_main(main)
