"""Several hosts on one machine: network namespaces joined by limited links.

Two hosts are the ends of one veth pair; a bridge connects more hosts. A token
bucket limits the rate at both ends, because it acts only on packets that leave.
A relay in a namespace between two hosts adds a one-way delay.
"""

import contextlib
import dataclasses
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

_PREFIX = "jaxmotion"
_SUBNET = "10.77.0"
_INTERFACE = "link0"
_NAMESPACES = Path("/run/netns")
_RATE = re.compile(r"(\d+(?:\.\d+)?)(k|m|g)bit")
_BITS = {"k": 1e3, "m": 1e6, "g": 1e9}
# One millisecond at the rate. A larger bucket sends the first bytes of every
# exchange without delay; a smaller bucket does not reach the rate.
_MIN_BURST_BYTES = 32 * 1024
_BURST_S = 1e-3

HEADER_BYTES = 66
"""Header bytes of a packet: Ethernet, IPv4 and TCP with timestamps."""


@dataclasses.dataclass(frozen=True)
class Host:
  """One host of a measurement."""

  address: str  # IPv4 address of the host.
  interface: str  # Name of the network interface that has the address.
  # Network namespace of the host; None is this machine itself.
  namespace: str | None = None

  def command(self, argv: list[str]) -> list[str]:
    """Returns the command line that runs `argv` on this host."""
    # The hostname there is the address, because gloo resolves the hostname to
    # find the interface.
    if self.namespace is None:
      return argv
    rename = f'hostname {self.address}; exec "$@"'
    inside = ["unshare", "--uts", "sh", "-c", rename, "sh", *argv]
    return ["ip", "netns", "exec", self.namespace, *inside]


def loopback_hosts(hosts: int) -> list[Host]:
  """Returns hosts that are all this machine; they need no permission."""
  return [Host("127.0.0.1", "lo")] * hosts


def count_sent(interface: str) -> tuple[int, int]:
  """Returns bytes and packets that left an interface of this process."""
  folder = Path("/sys/class/net", interface, "statistics")
  sent = [(folder / name).read_text() for name in ("tx_bytes", "tx_packets")]
  return int(sent[0]), int(sent[1])


def parse_rate(rate: str) -> float:
  """Returns the bits per second of a rate such as `100mbit`.

  >>> parse_rate("100mbit")
  100000000.0
  """
  if rate == "none":
    return float("inf")
  match = _RATE.fullmatch(rate)
  if not match or not float(match[1]):
    raise ValueError(f"must be none or like 100mbit or 1gbit, got {rate!r}.")
  return float(match[1]) * _BITS[match[2]]


def check_rate(rate: str) -> str:
  """Returns a rate that the link of a command line can have."""
  if rate != "loopback":
    parse_rate(rate)
  return rate


def explain_refusal() -> str | None:
  """Returns why limited links cannot be made here, or None if they can."""
  # Makes a link to find out, because the root of a container may lack the
  # right.
  for tool in ("ip", "tc", "unshare"):
    if shutil.which(tool) is None:
      return f"the tool {tool} is not installed"
  try:
    with linked_hosts(2, "100mbit"):
      return None
  except RuntimeError as error:
    return str(error)


def enter_user_namespace(argv: list[str]) -> None:
  """Restarts the program as root of its own user namespace."""
  # There links can be made without root. Returns if users may not have
  # namespaces here.
  if os.environ.get("JAXMOTION_UNSHARED") or shutil.which("unshare") is None:
    return
  inside = 'mount -t tmpfs none /run && exec "$@"'
  unshare = ["unshare", "-rnm", "sh", "-c"]
  probe = [*unshare, inside, "sh", "true"]
  if subprocess.run(probe, capture_output=True).returncode == 0:
    os.environ["JAXMOTION_UNSHARED"] = "1"
    os.execvp("unshare", [*unshare, inside, "sh", *argv])


@contextlib.contextmanager
def linked_hosts(
  hosts: int,
  rate: str = "none",
  delay_ms: float = 0.0,
  *,
  has_hub: bool = False,
) -> Iterator[list[Host]]:
  """Makes hosts with links between them, for as long as the context lasts."""
  # `delay_ms`: one-way delay in milliseconds; only between two hosts, or from
  # the hub. With `has_hub`, the first host has no limit, and the links of the
  # others have the limit in both directions.
  if hosts < 2:
    raise ValueError(f"`hosts` must be at least 2, got {hosts}.")
  if delay_ms < 0 or (delay_ms and hosts > 2 and not has_hub):
    raise ValueError(
      "`delay_ms` must be at least 0, and 0 for more than two hosts, got"
      f" {delay_ms}."
    )
  bits = parse_rate(rate)
  remove_stale_namespaces()
  names = [f"{_PREFIX}-{os.getpid()}-{i}" for i in range(hosts)]
  middle = f"{_PREFIX}-{os.getpid()}-middle"
  relays: list[subprocess.Popen] = []
  try:
    if hosts == 2 and not delay_ms and not has_hub:
      _add_namespaces(names)
      _add_link(names[0], _INTERFACE, names[1], _INTERFACE)
    else:
      _add_namespaces([*names, middle])
      for i, name in enumerate(names):
        _add_link(name, _INTERFACE, middle, f"port{i}")
        _run_ip(middle, "link", "set", f"port{i}", "up")
    made = [
      Host(f"{_SUBNET}.{i + 1}", _INTERFACE, name)
      for i, name in enumerate(names)
    ]
    for i, host in enumerate(made):
      _configure_host(host, float("inf") if has_hub and not i else bits)
      if has_hub and i:
        _limit_rate(middle, f"port{i}", bits)
    if delay_ms and not has_hub:
      relays.append(_start_relay(middle, ("port0", "port1"), delay_ms))
    elif hosts > 2 or has_hub:
      _run_ip(middle, "link", "add", "bridge0", "type", "bridge")
      _run_ip(middle, "link", "set", "bridge0", "up")
      for i in range(hosts):
        port = f"port{i}"
        if delay_ms and i:
          _add_link(middle, f"near{i}", middle, f"far{i}")
          _run_ip(middle, "link", "set", f"near{i}", "up")
          _run_ip(middle, "link", "set", f"far{i}", "up")
          relays.append(_start_relay(middle, (port, f"near{i}"), delay_ms))
          port = f"far{i}"
        _run_ip(middle, "link", "set", port, "master", "bridge0")
    yield made
  finally:
    for relay in relays:
      with relay:  # Closes its pipes and waits for its end.
        relay.kill()
    for name in (*names, middle):
      _delete_namespace(name)


def set_link(host: Host, state: str) -> None:
  """Turns the link of a host `up` or `down`."""
  assert host.namespace is not None
  _run_ip(host.namespace, "link", "set", host.interface, state)


def remove_stale_namespaces() -> None:
  """Removes the namespaces that killed runs have left behind."""
  for path in _NAMESPACES.glob(f"{_PREFIX}-*"):
    owner = path.name.split("-")[1]
    if owner.isdigit() and not Path("/proc", owner).exists():
      _delete_namespace(path.name)


def _add_namespaces(names: list[str]) -> None:
  for name in names:
    _run_tool("ip", "netns", "add", name)
    _run_ip(name, "link", "set", "lo", "up")


def _add_link(a: str, interface_a: str, b: str, interface_b: str) -> None:
  end, peer = ("netns", a), ("peer", "name", interface_b, "netns", b)
  _run_tool("ip", "link", "add", interface_a, *end, "type", "veth", *peer)


def _configure_host(host: Host, bits: float) -> None:
  """Gives a host its address and limits the rate of its link."""
  name = host.namespace
  assert name is not None
  _run_ip(name, "addr", "add", f"{host.address}/24", "dev", host.interface)
  _run_ip(name, "link", "set", host.interface, "up")
  # Hosts usually run cubic; the kernel's default may be bbr, which paces.
  route = (f"{_SUBNET}.0/24", "dev", host.interface, "congctl", "cubic")
  _run_ip(name, "route", "change", *route)
  _limit_rate(name, host.interface, bits)


def _limit_rate(namespace: str, interface: str, bits: float) -> None:
  """Limits the rate of what leaves an interface."""
  if bits != float("inf"):
    burst = max(_MIN_BURST_BYTES, round(bits / 8 * _BURST_S))
    bucket = ("rate", f"{bits:.0f}bit", "burst", f"{burst}b")
    device = ("dev", interface, "root", "tbf")
    _run_tool(
      "tc", "-n", namespace, "qdisc", "add", *device, *bucket, "latency", "50ms"
    )


def _start_relay(
  namespace: str, ports: tuple[str, str], delay_ms: float
) -> subprocess.Popen:
  relay = Path(__file__).with_name("relay.py")
  program = [sys.executable, str(relay), *ports, str(delay_ms / 1e3)]
  process = subprocess.Popen(
    ["ip", "netns", "exec", namespace, *program],
    stdin=subprocess.PIPE,
    stdout=subprocess.PIPE,
  )
  assert process.stdout is not None
  if not process.stdout.readline():
    raise RuntimeError("the relay that delays packets did not start")
  return process


def _run_ip(namespace: str, *arguments: str) -> None:
  _run_tool("ip", "-n", namespace, *arguments)


def _run_tool(*argv: str) -> None:
  done = subprocess.run(argv, capture_output=True, text=True)
  if done.returncode:
    said = " ".join(done.stderr.split())
    raise RuntimeError(f"{' '.join(argv[:3])} failed: {said}")


def _delete_namespace(name: str) -> None:
  subprocess.run(["ip", "netns", "del", name], capture_output=True)
