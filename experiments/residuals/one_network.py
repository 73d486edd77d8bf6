"""Memory that training a network takes of a device, in every mode.

  JAX_PLATFORMS=cpu python -m experiments.residuals.one_network \\
    --json=memory.jsonl

Compiled for a GPU that need not be there (the extra `cuda-compile`):
  temp_bytes       temporaries on the device; baseline: plain;
  host_temp_bytes  temporaries in host memory;
  argument_bytes   parameters and the batch;
  result_bytes     gradients, if any;
  device_bytes     temp_bytes, argument_bytes and result_bytes.
The compiler spends the memory that it is told of. Figures compare only if that
memory is the same; `machine` names it. cuDNN's workspace is not in the figures.
On the target `cpu` only residuals in loops count: XLA orders the rest for
speed, not for memory.

Predicted: flops (recomputed operations included), traffic_bytes_predicted and
step_ms_predicted. Measured on a machine with a GPU, each in a process of its
own: peak_bytes_in_use and step_ms.
"""

from absl import flags

from experiments.common import shared_flags
from experiments.common.console import make_console
from experiments.residuals import cases, measure
from experiments.residuals.networks import parse_networks
from experiments.residuals.run import measure_networks
from experiments.residuals.tables import point_table

_NETWORKS = flags.DEFINE_list(
  "networks",
  ["resnet152:16", "gpt:8"],
  "Networks and batches, NAME:BATCH.",
  allow_override=True,
)
_MODES = flags.DEFINE_list(
  "modes", list(cases.MODES), "Modes of training.", allow_override=True
)
_TARGET = flags.DEFINE_enum(
  "target",
  "h100",
  list(measure.TARGETS),
  "Device to compile for.",
  allow_override=True,
)
_MEMORY = flags.DEFINE_float(
  "memory_gib",
  None,
  "Memory that the compiler is told of; by default that of the GPU.",
  allow_override=True,
)
_JSON = shared_flags.define_rows()
_PLOT = shared_flags.define_plot()


def main() -> None:
  """Compiles, predicts and measures; prints a table, writes rows and a plot."""
  target, console = _TARGET.value, make_console()
  specs = parse_networks(_NETWORKS.value)
  if why := measure.explain_refusal(target):
    console.print(f"Nothing can be compiled for {target}: {why}.")
    return
  rows = measure_networks(
    specs,
    _MODES.value,
    target,
    "residuals_one_network",
    _JSON.value,
    _MEMORY.value,
  )
  console.print(point_table(rows).to_console())
  if _PLOT.value:
    from experiments.residuals.plot import save_plot  # Imports matplotlib.

    save_plot(rows, _PLOT.value)


if __name__ == "__main__":
  shared_flags.run_main(main)
