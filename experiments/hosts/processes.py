"""Programs on hosts, controlled over their standard input and output.

Commands and replies are one JSON object a line. Every command is sent to all
hosts at once, because they answer together or not at all.
"""

import json
import os
import queue
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from experiments.hosts.links import Host

_ROOT = Path(__file__).parents[2]
# Buffers in huge pages: the kernel maps the buffers of every step anew. With
# pages of 4 KiB, that can cost more than the step.
_ENVIRONMENT = {
  "PYTHONUNBUFFERED": "1",
  "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1",
  # Hosts share cores: threads of PyTorch that spin would take those of another
  # host. Then a step costs four times as much CPU time.
  "OMP_WAIT_POLICY": "PASSIVE",
}
_START_S = 120.0  # To start all programs.
_TAIL = 800  # Characters of a dead program's errors that are shown.

REPLY_S = 600.0
"""Seconds to reply to a command, unless it is given more."""


def find_free_port() -> int:
  """Returns a TCP port that no process listens on."""
  with socket.socket() as probe:
    probe.bind(("127.0.0.1", 0))
    return probe.getsockname()[1]


class HostError(RuntimeError):
  """Error of a host that failed, died or fell silent."""


class HostProcess:
  """Python program on one host."""

  def __init__(
    self,
    host: Host,
    module: str,
    arguments: list[str],
    name: str,
    variables: Mapping[str, str] = MappingProxyType({}),
  ):
    self.name = name
    self._log = tempfile.TemporaryFile("w+")
    program = [sys.executable, "-m", module, *arguments]
    self._process = subprocess.Popen(
      host.command(program),
      cwd=_ROOT,
      env=os.environ | _ENVIRONMENT | dict(variables),
      stdin=subprocess.PIPE,
      stdout=subprocess.PIPE,
      stderr=self._log,
      text=True,
    )
    self._replies: queue.Queue[str | None] = queue.Queue()
    threading.Thread(target=self._read_replies, daemon=True).start()

  @property
  def pid(self) -> int:
    """Process id of the program; `ip netns exec` and its shell exec it."""
    return self._process.pid

  def send(self, command: dict[str, Any]) -> None:
    """Sends a command to the program."""
    assert self._process.stdin is not None
    try:
      self._process.stdin.write(json.dumps(command) + "\n")
      self._process.stdin.flush()
    except OSError:
      raise self._describe_end() from None

  def receive(self, timeout_s: float) -> dict[str, Any]:
    """Waits for a reply of the program."""
    # `timeout_s`: seconds to wait.
    try:
      line = self._replies.get(timeout=max(0.0, timeout_s))
    except queue.Empty:
      raise HostError(
        f"{self.name} did not answer within {timeout_s:.0f} s"
      ) from None
    if line is None:
      raise self._describe_end()
    reply = json.loads(line)
    if "error" in reply:
      raise HostError(f"{self.name}: {reply['error']}")
    return reply

  def wait(self, timeout_s: float | None = None) -> tuple[int, str]:
    """Waits for the end; returns the exit code and the last errors."""
    code = self._process.wait(timeout_s)
    self._log.seek(0)
    return code, self._log.read()[-_TAIL:].strip()

  def has_ended(self) -> bool:
    """Returns whether the program has ended."""
    return self._process.poll() is not None

  def kill(self) -> None:
    """Kills the program at once."""
    self._process.kill()

  def close(self) -> None:
    """Ends the program: closes its input, and kills it 3 seconds later."""
    assert self._process.stdin is not None
    try:
      self._process.stdin.close()
    except OSError:
      pass
    try:
      self._process.wait(3)
    except subprocess.TimeoutExpired:
      self.kill()
      self._process.wait()
    self._log.close()

  def _read_replies(self) -> None:
    assert self._process.stdout is not None
    with self._process.stdout as lines:
      for line in lines:
        self._replies.put(line)
    self._replies.put(None)

  def _describe_end(self) -> HostError:
    code, said = self.wait()
    return HostError(f"{self.name} ended with code {code}: {said}")


class HostGroup:
  """One program on every host; the processes end with the context."""

  def __init__(self, hosts: list[Host], module: str, arguments: list[str]):
    # No two groups of a run share a port, nor do two runs on one loopback.
    port = find_free_port()
    self.processes: list[HostProcess] = []
    try:
      for rank, host in enumerate(hosts):
        place = [
          f"--coordinator={hosts[0].address}:{port}",
          f"--rank={rank}",
          f"--hosts={len(hosts)}",
          f"--interface={host.interface}",
        ]
        name = f"host {rank} ({module.rpartition('.')[2].strip('_')})"
        self.processes.append(
          HostProcess(host, module, [*place, *arguments], name)
        )
      self._receive_all(_START_S)
    except BaseException:
      self.close()
      raise

  def ask(
    self, command: dict[str, Any], timeout_s: float = REPLY_S
  ) -> list[dict[str, Any]]:
    """Sends one command to all hosts and returns their replies, by rank."""
    for process in self.processes:
      process.send(command)
    return self._receive_all(timeout_s)

  def close(self) -> None:
    """Ends the processes of all hosts."""
    for process in self.processes:
      process.kill()
    for process in self.processes:
      process.close()

  def __enter__(self) -> "HostGroup":
    return self

  def __exit__(self, *_: object) -> None:
    self.close()

  def _receive_all(self, timeout_s: float) -> list[dict[str, Any]]:
    deadline = time.monotonic() + timeout_s
    return [
      process.receive(deadline - time.monotonic()) for process in self.processes
    ]
