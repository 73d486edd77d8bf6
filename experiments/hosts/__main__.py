"""Trains an MLP on hosts with a limited link between them, and times it.

  python -m experiments.hosts --rate=100mbit --json=two_hosts.jsonl

Every case runs the same training step on every host, with another exchange:
`none` has none at all, `fp32` sums gradients as they are, and the peers are
PyTorch's DDP with its hooks. Cases take turns, so that a slow minute of the
machine falls on all alike. Bytes are those that the interfaces counted.

Hosts are network namespaces of this machine, which takes root, or a kernel
that lets users have namespaces of their own; `--rate=loopback` makes them
plain processes. All share this machine's cores.
"""

import contextlib
import importlib.util
import signal
import sys

import rich.console
from absl import app, flags

from experiments.common import records, shared_flags
from experiments.common.console import make_console
from experiments.hosts import links, measure, report, torch_worker
from experiments.hosts.processes import Group, HostError
from experiments.train import exchanges

_RATE = flags.DEFINE_string(
  "rate",
  "100mbit",
  "Of the link, such as 1gbit; none does not limit it, loopback has no link.",
)
_RTT_MS = flags.DEFINE_float(
  "rtt_ms", 0.0, "Round trip to add between two hosts, in milliseconds.", 0.0
)
_HOSTS = flags.DEFINE_integer("hosts", 2, "How many hosts.", 2)
_CASES = flags.DEFINE_list(
  "cases", ["none", *exchanges.EXCHANGES], "Exchanges to run."
)
_PEERS = flags.DEFINE_list(
  "peers", list(torch_worker.CASES), "PyTorch cases to run; empty for none."
)
_WIDTHS = flags.DEFINE_string(
  "widths", "784,2048,2048,2048,10", "Of the layers of the MLP."
)
_BATCH = flags.DEFINE_integer("batch", 32, "Examples a host.", 1)
_STEPS = flags.DEFINE_integer(
  "steps", 5, "Steps of a case in one round.", 1, allow_override=True
)
_ROUNDS = flags.DEFINE_integer("rounds", 5, "Turns every case gets.", 1)
_JSON = shared_flags.define_rows()
_PLOT = shared_flags.define_plot()

_JAX = "experiments.hosts.jax_worker"
_TORCH = "experiments.hosts.torch_worker"


def _experiment() -> str:
  name = f"hosts{_HOSTS.value}_{_RATE.value}"
  return name + (f"_rtt{_RTT_MS.value:g}ms" if _RTT_MS.value else "")


def _hosts() -> contextlib.AbstractContextManager[list[links.Host]]:
  if _RATE.value == "loopback":
    return contextlib.nullcontext(links.loopback(_HOSTS.value))
  return links.links(_HOSTS.value, _RATE.value, _RTT_MS.value / 2)


def _measure_all(console: rich.console.Console) -> list[measure.Result]:
  arguments = [f"--widths={_WIDTHS.value}", f"--batch={_BATCH.value}"]
  chosen = [(_JAX, _CASES.value), (_TORCH, _PEERS.value)]
  if _PEERS.value and importlib.util.find_spec("torch") is None:
    console.print("PyTorch is not installed (extra `peers`): not measured.")
    chosen.pop()
  with _hosts() as hosts, contextlib.ExitStack() as stack:
    groups = [
      (stack.enter_context(Group(hosts, module, arguments)), cases)
      for module, cases in chosen
      if cases
    ]
    return measure.measure(groups, _STEPS.value, _ROUNDS.value, console)


def main() -> None:
  """Measures what the flags describe."""
  for case in _CASES.value:
    if case != "none":
      exchanges.get_exchange(case)  # A misspelt name fails before any work.
  for case in _PEERS.value:
    if case not in torch_worker.CASES:
      raise app.UsageError(
        f"`--peers` must name some of {', '.join(torch_worker.CASES)}, got"
        f" {case!r}."
      )
  console = make_console()
  if _RATE.value != "loopback":
    why = links.refusal()
    if why:
      links.enter_user_namespace([sys.executable, *sys.orig_argv[1:]])
      console.print(f"Not measured: limited links cannot be made here, {why}")
      return
  # Namespaces go with the context that made them, so a polite end needs it to
  # be left.
  signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
  try:
    results = _measure_all(console)
  except (HostError, ValueError) as error:
    raise SystemExit(f"Stopped: {error}") from error
  rows = report.make_rows(results, _experiment(), _RTT_MS.value)
  console.print(report.make_table(rows))
  if _JSON.value:
    records.write_rows(_JSON.value, rows)
  if _PLOT.value:
    report.save_plot(rows, _PLOT.value)


if __name__ == "__main__":
  shared_flags.run_main(main)
