"""Times the training step of an MLP on hosts with a limited link between them.

  python -m experiments.hosts --rate=100mbit --json=results/hosts.jsonl

Every case runs the same training step on every host, with another exchange:
`none` exchanges nothing, `fp32` sums uncompressed gradients, `sharded_...` cuts
the optimizer into parts too, `delayed_...` applies gradients one step late, and
`diloco8_...` and `streaming8_...` exchange every 8 steps, and
`one_program_...` does not overlap with its own step. `carry_sum_1024kib` is a
collective alone: `sum`, `gather`, `alltoall` or `shifts`. The peers are
PyTorch's DDP with its hooks or with ZeroRedundancyOptimizer, and FSDP2. Cases
take turns, so that a slow minute of the machine falls on all alike. Bytes are
those that the interfaces counted.

Hosts are network namespaces of this machine. They need root, or a kernel that
gives users namespaces of their own. `--rate=loopback` makes hosts plain
processes instead. All hosts share this machine's cores.
"""

import sys

from absl import flags

from experiments.common import list_flags, records, shared_flags, signals
from experiments.common.console import JobError, make_console
from experiments.hosts import cases, links, rows as hosts_rows, run, worker
from experiments.hosts.processes import HostError
from experiments.hosts.run import Setting

_DEFAULT = Setting()
_RATE = list_flags.define_item(
  "rate",
  _DEFAULT.rate,
  links.check_rate,
  "Of the link, such as 1gbit; none does not limit it, loopback has no link.",
)
_RTT_MS = flags.DEFINE_float(
  "rtt_ms", 0.0, "Round trip to add between two hosts, in milliseconds.", 0.0
)
_HOSTS = flags.DEFINE_integer("hosts", _DEFAULT.hosts, "Number of hosts.", 2)
_CASES = list_flags.define_items(
  "cases",
  cases.EXCHANGE_CASES,
  cases.check_case,
  "Exchanges to run; empty for none.",
  least=0,
)
_PEERS = list_flags.define_names(
  "peers",
  cases.PEER_CASES,
  cases.PEER_CASES,
  "PyTorch cases to run; empty for none.",
  least=0,
)
_WIDTHS = list_flags.define_numbers(
  "widths",
  _DEFAULT.widths,
  "Widths of the layers of the MLP.",
  low=1,
  least=2,
  may_repeat=True,
)
_BATCH = flags.DEFINE_integer("batch", _DEFAULT.batch, "Examples a host.", 1)
_STEPS = flags.DEFINE_integer(
  "steps", _DEFAULT.steps, "Steps of a case in a round.", 1, allow_override=True
)
_ROUNDS = flags.DEFINE_integer(
  "rounds", _DEFAULT.rounds, "Turns of every case.", 1
)
_OPTIMIZER = flags.DEFINE_enum(
  "optimizer",
  _DEFAULT.optimizer,
  list(worker.OPTIMIZERS),
  "Optimizer of all cases.",
)
_JSON = shared_flags.define_rows()
_PLOT = shared_flags.define_plot()


def main() -> None:
  """Times the cases, prints the table, writes rows and plot."""
  if not _CASES.value and not _PEERS.value:
    raise JobError("`--cases` or `--peers` must name a case, got neither.")
  console = make_console()
  if _RATE.value != "loopback":
    why = links.explain_refusal()
    if why:
      links.enter_user_namespace([sys.executable, *sys.orig_argv[1:]])
      console.print(f"Not measured: limited links cannot be made here, {why}")
      return
  # Namespaces are removed when their context is left, so SIGTERM must leave it.
  signals.exit_on_sigterm()
  setting = Setting(
    _HOSTS.value,
    _RATE.value,
    _RTT_MS.value,
    _WIDTHS.value,
    _BATCH.value,
    _STEPS.value,
    _ROUNDS.value,
    _OPTIMIZER.value,
  )
  try:
    results = run.measure_cases(setting, _CASES.value, _PEERS.value, console)
  except (HostError, ValueError) as error:
    raise SystemExit(f"Stopped: {error}") from error
  rows = hosts_rows.make_rows(results, setting)
  console.print(hosts_rows.byte_table(rows).to_console())
  records.write_rows(_JSON.value, rows)
  if _PLOT.value:
    from experiments.hosts.plot import save_plot  # Imports matplotlib.

    save_plot(rows, _PLOT.value)


if __name__ == "__main__":
  shared_flags.run_main(main)
