import os
import pathlib
import signal
import subprocess
import sys
import time

import pytest

from experiments.common import records
from experiments.hosts import links as hosts_links
from experiments.hosts.links import HEADER_BYTES, Host, linked_hosts, parse_rate
from tests.experiments.jobs import run_module
from tests.paths import ROOT

REFUSAL = hosts_links.explain_refusal()
PERMITTED = pytest.mark.skipif(REFUSAL is not None, reason=str(REFUSAL))
# Sends argv[2] bytes to the address argv[1] and says how long that took, or
# receives them; then says what its interface has counted.
TALK = """
import socket, sys, time
from experiments.hosts.links import count_sent
role, address, size = sys.argv[1], sys.argv[2], int(sys.argv[3])
before = count_sent("link0")
begin = time.monotonic()
if role == "receive":
  server = socket.create_server((address, 5000))
  print("ready", flush=True)
  peer, _ = server.accept()
  while size:
    size -= len(peer.recv(min(size, 1 << 16)))
  peer.sendall(b"!")
else:
  peer = socket.create_connection((address, 5000))
  peer.sendall(bytes(size))
  assert peer.recv(1) == b"!"
took = time.monotonic() - begin
time.sleep(0.1)
after = count_sent("link0")
print(took, after[0] - before[0], after[1] - before[1], flush=True)
"""


def namespaces(process):
  """Namespaces that a process made; others measure at the same time."""
  listed = subprocess.run(["ip", "netns"], capture_output=True, text=True)
  names = {line.split()[0] for line in listed.stdout.splitlines()}
  return {name for name in names if name.split("-")[1:2] == [str(process)]}


def start(host, *arguments):
  program = [sys.executable, "-c", TALK, *map(str, arguments)]
  return subprocess.Popen(
    host.command(program), stdout=subprocess.PIPE, text=True
  )


def transfer(hosts, size):
  """(seconds, bytes, packets) of sending `size` bytes from host to host."""
  a, b = hosts
  receiver = start(b, "receive", b.address, size)
  assert receiver.stdout.readline() == "ready\n"
  sender = start(a, "send", b.address, size)
  out, _ = sender.communicate(timeout=60)
  receiver.communicate(timeout=60)
  seconds, sent, packets = out.split()
  return float(seconds), int(sent), int(packets)


@pytest.mark.slow
@PERMITTED
def test_a_link_has_the_rate_and_the_delay_and_counts_every_byte():
  size = 1_000_000
  with linked_hosts(2, "20mbit", delay_ms=25.0) as hosts:
    slow, sent, packets = transfer(hosts, size)
    late, *_ = transfer(hosts, 1)
  # The bucket lets some through at once; an idle machine can only be slower.
  burst = 32 * 1024
  assert slow > 0.9 * 8 * (size - burst) / 20e6
  assert sent - HEADER_BYTES * packets == pytest.approx(size, rel=0.01)
  # A connection, a byte and an answer: two round trips at least.
  assert late > 0.1


@pytest.mark.slow
@PERMITTED
def test_links_to_a_hub_have_the_rate_both_ways_and_the_delay():
  size = 1_000_000
  with linked_hosts(3, "20mbit", delay_ms=25.0, has_hub=True) as hosts:
    hub, host, _ = hosts
    up, down = transfer((host, hub), size)[0], transfer((hub, host), size)[0]
    late, *_ = transfer((host, hub), 1)
  for seconds in (up, down):
    assert seconds > 0.9 * 8 * (size - 32 * 1024) / 20e6
  assert late > 0.1


@pytest.mark.slow
@PERMITTED
def test_namespaces_go_with_the_context():
  before = namespaces(os.getpid())
  with pytest.raises(KeyError), linked_hosts(3) as made:
    assert len({host.address for host in made}) == 3
    assert {host.namespace for host in made} <= namespaces(os.getpid()) - before
    raise KeyError
  assert namespaces(os.getpid()) <= before


@pytest.mark.slow
@PERMITTED
def test_what_a_killed_run_left_behind_is_removed():
  ended = subprocess.run(
    [sys.executable, "-c", "import os; print(os.getpid())"],
    capture_output=True,
    text=True,
  )
  process = int(ended.stdout)
  name = f"jaxmotion-{process}-0"
  subprocess.run(["ip", "netns", "add", name], check=True)
  assert namespaces(process) == {name}
  hosts_links.remove_stale_namespaces()
  assert not namespaces(process)


def test_a_host_is_named_by_its_address():
  host = Host("10.77.0.1", "link0", "jaxmotion-1-0")
  command = host.command(["true"])
  assert command[:4] == ["ip", "netns", "exec", "jaxmotion-1-0"]
  assert command[-1] == "true" and any("10.77.0.1" in word for word in command)
  assert Host("127.0.0.1", "lo").command(["true"]) == ["true"]


def test_why_links_cannot_be_made_is_said(monkeypatch):
  monkeypatch.setattr(hosts_links.shutil, "which", lambda tool: None)
  assert hosts_links.explain_refusal() == "the tool ip is not installed"


@pytest.mark.parametrize("rate", ["100", "fast", "0mbit", "-1mbit", "1 gbit"])
def test_bad_rates_are_named(rate):
  for use in (parse_rate, lambda rate: linked_hosts(2, rate).__enter__()):
    with pytest.raises(ValueError, match="must be none or like 100mbit"):
      use(rate)


@pytest.mark.parametrize(
  ("hosts", "delay_ms", "name"), [(1, 0, "hosts"), (3, 1, "delay_ms")]
)
def test_bad_arguments_are_named(hosts, delay_ms, name):
  with pytest.raises(ValueError, match=f"`{name}` must be"):
    with linked_hosts(hosts, "none", delay_ms):
      pass


def test_the_relay_imports_nothing_of_ours():
  # It runs by its path, where the package may not be importable.
  text = pathlib.Path(hosts_links.__file__).with_name("relay.py").read_text()
  assert "experiments" not in text and "jaxmotion" not in text


SMALL = ["--widths=64,4096,10", "--batch=4", "--steps=2", "--rounds=2"]
WAIT_S = 120


@pytest.mark.slow
@PERMITTED
def test_a_slow_link_makes_fewer_bytes_faster_and_counts_those_predicted(
  tmp_path,
):
  cases = ["fp32", "bf16", "int8", "int4_feedback", "sharded_int4"]
  json = tmp_path / "rows.jsonl"
  done = run_module(
    *("hosts", *SMALL),
    "--rate=50mbit",
    "--rtt_ms=2",
    f"--cases=none,{','.join(cases)}",
    "--peers=torch_fp32",
    f"--json={json}",
  )
  assert done.returncode == 0, done.stderr
  rows = records.read_rows(json)
  assert rows[0].experiment == "hosts_2_50mbit_rtt2ms"
  values = {(row.case, row.metric): row.value for row in rows}
  # 4x fewer bytes; the link alone takes 190 ms for those of fp32.
  assert values["int8", "speedup"] > 1.5
  assert values["int8", "ideal_ratio"] > 0.8
  for case in cases:
    assert values[case, "wire_bytes_counted"] == pytest.approx(
      values[case, "wire_bytes_predicted"], rel=0.03, abs=4096
    )
  assert values["none", "interface_bytes"] < 1000


@pytest.mark.slow
@PERMITTED
def test_an_ended_run_leaves_no_namespaces_behind():
  endless = ["--rounds=100000"]
  process = subprocess.Popen(
    [sys.executable, "-m", "experiments.hosts", *SMALL, "--peers=", *endless],
    cwd=ROOT,
    stdout=subprocess.DEVNULL,
    stderr=subprocess.DEVNULL,
  )
  deadline = time.monotonic() + WAIT_S
  seen = 0
  # The first ones are those of the question whether any can be made.
  while seen < 10 and time.monotonic() < deadline:
    time.sleep(0.1)
    seen = seen + 1 if namespaces(process.pid) else 0
  assert namespaces(process.pid)
  process.send_signal(signal.SIGTERM)
  assert process.wait(WAIT_S) == 128 + signal.SIGTERM
  assert not namespaces(process.pid)
