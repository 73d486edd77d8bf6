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

from experiments.common import shared_flags
from experiments.common.console import make_console
from experiments.residuals import measure, paper
from experiments.residuals.networks import parse_networks
from experiments.residuals.run import Question, run_experiment

_USUAL = (
  "plain",
  "jax_checkpoint",
  "jax_offload",
  "cut",
  "cut_int4",
  "cut_together",
  "cut_int4_together",
  "update_int4_host",
  "everything",
)
_NETWORKS = flags.DEFINE_list(
  "networks",
  list(paper.NETWORKS),
  "Networks and batches, NAME:BATCH.",
  allow_override=True,
)
_MODES = flags.DEFINE_list(
  "modes", list(_USUAL), "Modes of training.", allow_override=True
)
_LIMIT = flags.DEFINE_float("limit_gb", 12.0, "Device memory, 10^9 bytes.")
_FIT = flags.DEFINE_list(
  "fit",
  ["plain", "jax_checkpoint", "cut_int4", "everything", "streamed"],
  "Modes whose deepest network and largest batch are searched.",
)
_BATCH_OF = flags.DEFINE_list(
  "batch_of", ["resnet50"], "Networks whose largest batch is searched."
)
_BUDGETS = flags.DEFINE_list(
  "budgets",
  ["0.5", "0.25", "0.1", "0.05"],
  "Budgets of `planner.fit_memory`, relative to plain training's memory.",
)
_BUDGET_OF = flags.DEFINE_list(
  "budget_of", ["gpt:8", "resnet152:32"], "Networks planned under budgets."
)
_TARGET = flags.DEFINE_enum(
  "target",
  "h100",
  list(measure.TARGETS),
  "Device to compile for.",
  allow_override=True,
)
_FRESH = flags.DEFINE_bool(
  "fresh", False, "Measure again what is in --json.", allow_override=True
)
_JSON = shared_flags.define_rows()
_PLOT = shared_flags.define_plot()


def main() -> None:
  """Runs the job that the flags describe."""
  target = _TARGET.value
  if why := measure.explain_refusal(target):
    make_console().print(f"Nothing can be compiled for {target}: {why}.")
    return
  question = Question(
    parse_networks(_NETWORKS.value),
    _MODES.value,
    _FIT.value,
    _BATCH_OF.value,
    _LIMIT.value,
    parse_networks(_BUDGET_OF.value),
    [float(share) for share in _BUDGETS.value],
  )
  run_experiment(
    question,
    target,
    json=_JSON.value,
    plot=_PLOT.value,
    fresh=_FRESH.value,
  )


if __name__ == "__main__":
  shared_flags.run_main(main)
