"""Measures islands that meet on an S3 server behind limited links.

  python -m experiments.islands.links --json=results/islands_links.jsonl

Two islands and a server are network namespaces of this machine, and share its
cores. The link of each island has the rate in both directions; that of the
server has no limit. The model has ten million parameters, and an inner step
sleeps. Utilization is the time of inner steps divided by all time. The server
is moto's, in memory. It needs root, or user namespaces.
"""

import contextlib
import importlib.util
import itertools
import statistics
import sys

from absl import flags

from experiments.common import (
  console,
  list_flags,
  records,
  shared_flags,
  signals,
)
from experiments.common.console import JobError
from experiments.common.records import Measured, Metrics
from experiments.hosts import links
from experiments.hosts.processes import HostError, HostProcess
from experiments.islands import tables

LINKS = {"100mbit": ("100mbit", 0.0), "20mbit_rtt50ms": ("20mbit", 50.0)}
"""Rate and round trip in milliseconds, by name."""

_PORT = 9000
_LINKS = list_flags.define_names("links", LINKS, LINKS, "Links to measure.")
_STEP_MS = flags.DEFINE_integer("step_ms", 200, "Sleep of an inner step.", 1)
_EVERY = flags.DEFINE_integer("every", 30, "Inner steps of a round.", 1)
_DELAYS = list_flags.define_numbers(
  "delays", (20,), "Steps that go on after a change was sent.", low=0
)
_FRAGMENTS = list_flags.define_numbers(
  "fragments", (1,), "Parts of the model, which are sent in turns.", low=1
)
_ROUNDS = flags.DEFINE_integer(
  "rounds", 3, "Rounds to measure.", 1, allow_override=True
)
_JSON = shared_flags.define_rows()


def measure_link(
  rate: str,
  rtt_ms: float,
  delay: int,
  fragments: int,
  every: int,
  step_ms: int,
  rounds: int,
) -> Metrics:
  """Runs a server and two islands; returns the figures of an island."""
  with contextlib.ExitStack() as stack:
    linked = links.linked_hosts(3, rate, rtt_ms / 2, has_hub=True)
    server, *hosts = stack.enter_context(linked)

    def start(
      host: links.Host, module: str, arguments: list[str]
    ) -> HostProcess:
      process = HostProcess(host, module, arguments, f"{host.address} {module}")
      stack.callback(process.close)
      stack.callback(process.kill)
      return process

    start(server, "moto.server", ["-H", server.address, "-p", str(_PORT)])
    arguments = [
      f"--server={server.address}:{_PORT}",
      *(f"--every={every}", f"--delay={delay}", f"--fragments={fragments}"),
      *(f"--step_ms={step_ms}", f"--rounds={rounds}"),
    ]
    islands = []
    for i, host in enumerate(hosts):
      own = [f"--name=island{i}", f"--interface={host.interface}"]
      module = "experiments.islands.worker"
      islands.append(start(host, module, [*arguments, *own]))
    limit_s = 120 + (rounds + 2) * (every * step_ms / 1e3 + 60)
    reports = [island.receive(limit_s) for island in islands]
  if len({report["anchor"] for report in reports}) > 1:
    raise JobError("The islands ended with anchors of other bits.")
  units = {
    "utilization": "x",
    "round_s": "s",
    "wire_bytes": "bytes",
    "predicted_bytes": "bytes",
  }
  return {
    metric: Measured(statistics.fmean(r[metric] for r in reports), unit)
    for metric, unit in units.items()
  }


def main() -> None:
  """Measures the links, prints the table and writes rows."""
  if importlib.util.find_spec("moto") is None:
    raise JobError("The S3 server is missing: pip install 'moto[server]'.")
  printer = console.make_console()
  if why := links.explain_refusal():
    links.enter_user_namespace([sys.executable, *sys.orig_argv[1:]])
    raise JobError(f"Limited links cannot be made here: {why}.")
  # Namespaces are removed when their context is left, so SIGTERM must leave it.
  signals.exit_on_sigterm()
  machine = records.describe_run("emulated links")
  cases: dict[str, Metrics] = {}
  setting = _EVERY.value, _STEP_MS.value, _ROUNDS.value
  for name, delay, fragments in itertools.product(
    _LINKS.value, _DELAYS.value, _FRAGMENTS.value
  ):
    printer.print(f"{name}, delay {delay}, fragments {fragments}")
    try:
      figures = measure_link(*LINKS[name], delay, fragments, *setting)
    except (HostError, RuntimeError) as error:
      raise JobError(str(error)) from error
    cases[f"{name}/{delay}/{fragments}"] = figures
    rows = records.make_rows("islands_links", cases, machine=machine)
    records.write_rows(_JSON.value, rows)
  printer.print(tables.summary_table(rows).to_console())


if __name__ == "__main__":
  shared_flags.run_main(main)
