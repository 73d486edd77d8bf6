"""Compiles networks in every mode of saving residuals, beside the papers'.

  JAX_PLATFORMS=cpu python -m experiments.residuals \\
    --json=docs/results/residuals.jsonl --plot=docs/results/residuals.png

The networks are those of Layrub and Layup. Compiled for a GPU that need not be
there (the extra `cuda-compile`), relative to plain training:
  temp_bytes       temporaries on the device;
  host_temp_bytes  temporaries in host memory;
  argument_bytes   parameters and the batch;
  result_bytes     gradients, if any;
  device_bytes     temp_bytes, argument_bytes and result_bytes.
The compiler spends the memory that it is told of. Figures compare only if that
memory is the same; `machine` names it. cuDNN's workspace is not in the figures.
Predicted: flops (recomputed operations included), traffic_bytes_predicted and
step_ms_predicted. Measured on a machine with a GPU, each in a process of its
own: peak_bytes_in_use and step_ms. Further rows, for a device of --limit_gb
that holds parameters, gradients and batch too:
  deepest        bottleneck ResNet, batch 16, 224 pixels, (3, n, 5n, 3) blocks;
  largest_batch  of the networks of --batch_of.
Both are sizes whose program was compiled and fits; `device_bytes_drawn` is the
prediction from two smaller programs. Only these have the mode `streamed`: its
parameters stay on the host (`host_temp_bytes`) and come in 8 bits, some blocks
at a time. `budget_...` are plans of `planner.fit_memory` for the whole loss of
--budget_of under --budgets. Rows in --json of the same sources and JAX are not
measured again, unless with --fresh; rows of what was not asked for stay.
"""

from absl import flags

from experiments.common import list_flags, records, shared_flags
from experiments.common.console import make_console
from experiments.residuals import cases, measure, networks, run, tables

_USUAL = (
  *("plain", "jax_checkpoint", "jax_offload", "cut", "cut_int4"),
  *("cut_together", "cut_int4_together", "update_int4_host", "everything"),
)
_NETWORKS = list_flags.define_items(
  "networks",
  list(networks.NETWORKS),
  networks.parse_network,
  "Networks and batches, NAME:BATCH.",
  least=0,
)
_MODES = list_flags.define_names(
  "modes", _USUAL, cases.MODES, "Modes of training."
)
_LIMIT = flags.DEFINE_float(
  "limit_gb", 12.0, "Device memory, 10^9 bytes.", 1e-9
)
_FIT = list_flags.define_names(
  "fit",
  ["plain", "jax_checkpoint", "cut_int4", "everything", "streamed"],
  (*cases.MODES, "streamed"),
  "Modes whose deepest network and largest batch are searched.",
  least=0,
)
_BATCH_OF = list_flags.define_names(
  "batch_of",
  ["resnet50"],
  networks.list_networks(),
  "Networks whose largest batch is searched.",
  least=0,
)
_BUDGETS = list_flags.define_numbers(
  "budgets",
  [0.5, 0.25, 0.1, 0.05],
  "Budgets of `planner.fit_memory`, relative to plain training's memory.",
  low=0,
  high=1,
  above_low=True,
)
_BUDGET_OF = list_flags.define_items(
  "budget_of",
  ["gpt:8", "resnet152:32"],
  networks.parse_network,
  "Networks planned under budgets.",
  least=0,
)
_TARGET = measure.define_target()
_FRESH = shared_flags.define_fresh()
_JSON = shared_flags.define_rows()
_PLOT = shared_flags.define_plot()


def main() -> None:
  """Measures and searches; prints tables, writes rows and a plot."""
  target, console = _TARGET.value, make_console()
  if why := measure.explain_refusal(target):
    console.print(f"Nothing can be compiled for {target}: {why}.")
    return
  job = run.Job(target, _JSON.value, _FRESH.value)
  job.measure_networks(_NETWORKS.value, _MODES.value)
  console.print(tables.point_table(job.list_points()).to_console())
  job.find_limits(_FIT.value, _BATCH_OF.value, _LIMIT.value)
  for spec in _BUDGET_OF.value:
    job.fit_budgets(spec, _BUDGETS.value)
  rows = job.list_rows()
  console.print(tables.comparison_table(rows).to_console())
  records.write_rows(_JSON.value, rows)
  if _PLOT.value:
    from experiments.residuals.plot import save_plot  # Imports matplotlib.

    save_plot(rows, _PLOT.value)


if __name__ == "__main__":
  shared_flags.run_main(main)
