"""Jobs of several processes: start them, and end them together.

Every runner that trains can be started once on each host, with the usual
arguments of `jax.distributed`:

  python -m experiments.train --coordinator_address=10.0.0.1:1234 \
    --num_processes=2 --process_id=0      # and 1 on the other host

or with JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and JAX_PROCESS_ID set, or
with `--distributed` where JAX knows the cluster (SLURM, Open MPI, Kubernetes).

If one process ends, all processes end. On the CPU backend the others notice a
process that

* died in a collective: at once (its connection is reset);
* stalled in a collective, or lost its link: after `COLLECTIVE_TIMEOUT_S`;
* died while they compile or wait outside of a collective, at the start or at
  the end: after `HEARTBEAT_TIMEOUT_S`;
* never started: after `INITIALIZATION_TIMEOUT_S` and a few seconds.

SIGINT and SIGTERM end a process at once, and the others as if it had died. In a
collective the others exit with code 1 and one line that says so. Elsewhere, and
sometimes when process 0 died, JAX's own client is faster: it prints its message
and raises SIGABRT. `jax_enable_recoverability` changes neither, and with it no
process notices a death outside of collectives.

Process 0 listens on the address in numbers that `--coordinator_address` gives.
A name makes it listen on all addresses of its host, as does an address that its
host does not have; JAX_COORDINATOR_BIND_ADDRESS overrides both. Whoever reaches
that port, or the port of a worker's transport, can take part: there is no
password and no encryption. Keep the hosts of a job in a network of their own.
"""

import contextlib
import ipaddress
import logging
import os
import socket
import sys
import traceback
from collections.abc import Iterator
from typing import Any

import jax
from absl import flags

from experiments.common import console
from experiments.common.console import JobError

INITIALIZATION_TIMEOUT_S = 60
# Some processes find their programs in the compilation cache, others compile.
COMPILATION_TIMEOUT_S = 1800
# A process that writes or stalls for longer than this is taken for dead.
COLLECTIVE_TIMEOUT_S = 30
# Heartbeats come every half of this time. Even the half is longer than the time
# of collectives, because their error can be caught, whereas a lost heartbeat
# aborts the process.
HEARTBEAT_TIMEOUT_S = 80

_COLLECTIVE_FLAG = "--xla_cpu_collective_timeout_seconds"
_LOST = ("Gloo", "Timed out waiting", "heartbeat", "oordination", "Barrier")

_ADDRESS = flags.DEFINE_string(
  "coordinator_address",
  None,
  "host:port of process 0 (or JAX_COORDINATOR_ADDRESS): several processes.",
)
_COUNT = flags.DEFINE_integer(
  "num_processes", None, "Number of processes (or JAX_NUM_PROCESSES)."
)
_INDEX = flags.DEFINE_integer(
  "process_id", None, "Index of this process (or JAX_PROCESS_ID)."
)
_DETECT = flags.DEFINE_bool(
  "distributed",
  False,
  "Ask the cluster for those of the three that are not given.",
)


@contextlib.contextmanager
def join_job() -> Iterator[int]:
  """Joins this process to a job, as the flags and the environment say."""
  # Enter the context before JAX starts. In a job of several processes, an
  # exception in the body ends the process at once, with exit code 1 and one
  # line: an ordinary exit would wait for the other processes.
  # It yields the number of processes, 1 if nothing asks for several.
  arguments = _read_arguments()
  if arguments is None:
    yield 1
    return
  who = f"Process {arguments.get('process_id', '?')}"
  try:
    initialize(**arguments)
    count, index = _read_membership()
    who = f"Process {index} of {count}"
    yield count
    jax.distributed.shutdown()
  except BaseException as error:
    _end_process(who, error)


def initialize(**arguments: Any) -> None:
  """Calls `jax.distributed.initialize` with short timeouts."""
  # It tells of each start, on standard error.
  logging.getLogger("jax._src.distributed").setLevel(logging.WARNING)
  # JAX's preemption service would catch SIGTERM and let the process go on.
  jax.config.update("jax_enable_preemption_service", False)
  flags_given = os.environ.get("XLA_FLAGS", "")
  if _COLLECTIVE_FLAG not in flags_given:  # By default half an hour.
    limit = f"{_COLLECTIVE_FLAG}={COLLECTIVE_TIMEOUT_S}"
    os.environ["XLA_FLAGS"] = f"{flags_given} {limit}".strip()
  jax.distributed.initialize(
    **_bind_narrowly(arguments),
    initialization_timeout=INITIALIZATION_TIMEOUT_S,
    heartbeat_timeout_seconds=HEARTBEAT_TIMEOUT_S,
    shutdown_timeout_seconds=HEARTBEAT_TIMEOUT_S,
  )


def member_flags(address: str, count: int, index: int) -> list[str]:
  """Returns the flags that make a process one of several."""
  return [
    f"--coordinator_address={address}",
    f"--num_processes={count}",
    f"--process_id={index}",
  ]


def wait_for_processes(name: str) -> None:
  """Waits until all processes have come this far, however long they compile."""
  # A collective would take a process that compiles for one that stalls.
  from jax._src.distributed import global_state

  if global_state.client is not None:
    limit_ms = 1000 * COMPILATION_TIMEOUT_S
    global_state.client.wait_at_barrier(name, timeout_in_ms=limit_ms)


def _bind_narrowly(arguments: dict[str, Any]) -> dict[str, Any]:
  """Adds the address that process 0 listens on, if it is surely its own."""
  # JAX listens on all addresses of the host, and lets in whoever connects. A
  # name may mean another address on its own host than on the others, so only an
  # address in numbers is taken; JAX_COORDINATOR_BIND_ADDRESS overrides it.
  host, _, port = str(arguments.get("coordinator_address")).rpartition(":")
  if "JAX_COORDINATOR_BIND_ADDRESS" in os.environ or not port.isdigit():
    return arguments
  try:
    bare = ipaddress.ip_address(host.strip("[]"))
    family = socket.AF_INET if bare.version == 4 else socket.AF_INET6
    with socket.socket(family) as probe:
      probe.bind((str(bare), 0))
  except (OSError, ValueError):
    return arguments  # A name, or an address of a translating router.
  return arguments | {"coordinator_bind_address": f"{host}:{port}"}


def _read_arguments() -> dict[str, Any] | None:
  """Returns the arguments of `initialize`, None for a single process."""
  address = _ADDRESS.value or os.environ.get("JAX_COORDINATOR_ADDRESS")
  count = _read_number(_COUNT, "JAX_NUM_PROCESSES")
  index = _read_number(_INDEX, "JAX_PROCESS_ID")
  given = {
    "coordinator_address": address,
    "num_processes": count,
    "process_id": index,
  }
  known = {name: value for name, value in given.items() if value is not None}
  if _DETECT.value:
    return known
  if not known:
    return None
  if address is None or count is None or index is None:
    missing = [f"`--{name}`" for name in given if name not in known]
    raise JobError(
      f"{' and '.join(missing)} must be given with the other arguments of a"
      f" job of several processes (or `--distributed`), got {known}."
    )
  if not 0 <= index < count:
    raise JobError(
      "`--process_id` must be at least 0 and less than `--num_processes` ="
      f" {count}, got {index}."
    )
  # All three are given: a detected cluster must not override any of them.
  return known | {"cluster_detection_method": "deactivate"}


def _read_number(flag: flags.FlagHolder, variable: str) -> int | None:
  if flag.value is not None:
    return flag.value
  text = os.environ.get(variable)
  if text is None:
    return None
  if not text.isdigit():
    raise JobError(f"`{variable}` must be a number, got {text!r}.")
  return int(text)


def _read_membership() -> tuple[int, int]:
  """Returns the number of processes and this one's index, before JAX starts."""
  # `jax.process_count()` would start JAX, and with it the CPU backend, whose
  # number of devices depends on the number of processes.
  from jax._src.distributed import global_state

  return global_state.num_processes, global_state.process_id


def _end_process(who: str, error: BaseException) -> None:
  """Ends the process without the barrier of an ordinary exit."""
  text = " ".join(str(error).split())
  reason = f"{type(error).__name__}: {text}"
  if isinstance(error, SystemExit | JobError):
    reason = text
  elif isinstance(error, OSError):
    reason = console.describe_failure(error)
  elif _is_loss(error, text):
    reason = f"another process died, stalled or was cut off ({reason})"
  elif line := console.describe_missing_field(error):
    reason = line
  else:
    traceback.print_exception(error)
  with contextlib.suppress(OSError):  # Where output goes to a full disk.
    sys.stdout.flush()
  print(f"{who} ended: {reason}", file=sys.stderr, flush=True)
  os._exit(1)


def _is_loss(error: BaseException, text: str) -> bool:
  """Returns whether an error says that another process is gone."""
  # JAX raises a status of the transport as ValueError where its code is that
  # of an invalid argument, such as a peer that does not connect in time.
  kinds = jax.errors.JaxRuntimeError, ValueError
  return isinstance(error, kinds) and any(word in text for word in _LOST)
