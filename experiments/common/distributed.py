"""Several processes as one job: starting them, and ending together.

Every runner that trains can be started once on each host, with the usual
arguments of `jax.distributed`:

  python -m experiments.train --coordinator_address=10.0.0.1:1234 \
    --num_processes=2 --process_id=0      # and 1 on the other host

or with JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and JAX_PROCESS_ID set, or
with `--distributed` where JAX knows the cluster (SLURM, Open MPI, Kubernetes).

A job ends everywhere when it ends somewhere. On the CPU backend the others
notice a process that

* died in a collective: at once (its connection is reset);
* stalled, or whose link is cut, in a collective: in `COLLECTIVE_TIMEOUT_S`;
* is gone while they wait outside of one (a checkpoint, the end): in
  `HEARTBEAT_TIMEOUT_S`;
* never came: in `INITIALIZATION_TIMEOUT_S` and a few more.

In a collective they end with exit code 1 and one line that says so. Elsewhere,
and now and then when process 0 died, JAX's own client is faster: its message
and SIGABRT. `jax_enable_recoverability` changes neither, and with it nobody
notices a death outside of collectives.
"""

import contextlib
import os
import sys
import traceback
from collections.abc import Iterator
from typing import Any

import jax
from absl import flags

INITIALIZATION_TIMEOUT_S = 60
# A process that compiles or writes for longer than this holds up the others.
COLLECTIVE_TIMEOUT_S = 30
# Longer than a collective's: its error can be caught, a heartbeat's aborts.
HEARTBEAT_TIMEOUT_S = 40

_COLLECTIVE_FLAG = "--xla_cpu_collective_timeout_seconds"
_LOST = ("Gloo", "Timed out waiting", "heartbeat", "oordination", "Barrier")

_ADDRESS = flags.DEFINE_string(
  "coordinator_address",
  None,
  "host:port of process 0 (or JAX_COORDINATOR_ADDRESS): several processes.",
)
_COUNT = flags.DEFINE_integer(
  "num_processes", None, "How many processes (or JAX_NUM_PROCESSES)."
)
_INDEX = flags.DEFINE_integer(
  "process_id", None, "Which of them this one is (or JAX_PROCESS_ID)."
)
_DETECT = flags.DEFINE_bool(
  "distributed", False, "Ask the cluster for what is not given of the three."
)


@contextlib.contextmanager
def join_job() -> Iterator[int]:
  """Makes this process one of a job's, as the flags and the environment say.

  Enter it before JAX starts. In a job of several processes, an exception in
  the body ends the process at once, with exit code 1 and one line: an ordinary
  end would wait for the processes that it is the end of.

  Yields:
    The number of processes, 1 if nothing asks for several.

  Raises:
    ValueError: some but not all of the arguments are given, or they
      contradict each other.
  """
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
  """`jax.distributed.initialize` that waits for nobody without end.

  Args:
    **arguments: of that function, but for its timeouts.
  """
  flags_given = os.environ.get("XLA_FLAGS", "")
  if _COLLECTIVE_FLAG not in flags_given:  # By default half an hour.
    limit = f"{_COLLECTIVE_FLAG}={COLLECTIVE_TIMEOUT_S}"
    os.environ["XLA_FLAGS"] = f"{flags_given} {limit}".strip()
  jax.distributed.initialize(
    **arguments,
    initialization_timeout=INITIALIZATION_TIMEOUT_S,
    heartbeat_timeout_seconds=HEARTBEAT_TIMEOUT_S,
    shutdown_timeout_seconds=HEARTBEAT_TIMEOUT_S,
  )


def _read_arguments() -> dict[str, Any] | None:
  """What to start with; None for a process alone."""
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
    raise ValueError(
      f"{' and '.join(missing)} must be given with the other arguments of a"
      f" job of several processes (or `--distributed`), got {known}."
    )
  if not 0 <= index < count:
    raise ValueError(
      "`--process_id` must be at least 0 and less than `--num_processes` ="
      f" {count}, got {index}."
    )
  # What is given is enough: no cluster is asked for a part of it.
  return known | {"cluster_detection_method": "deactivate"}


def _read_number(flag: flags.FlagHolder, variable: str) -> int | None:
  if flag.value is not None:
    return flag.value
  text = os.environ.get(variable)
  if text is None:
    return None
  if not text.isdigit():
    raise ValueError(f"`{variable}` must be a number, got {text!r}.")
  return int(text)


def _read_membership() -> tuple[int, int]:
  """Number of processes and this one's index, before JAX starts.

  `jax.process_count()` would start it, and with it the CPU backend, whose
  number of devices depends on the number of processes.
  """
  from jax._src.distributed import global_state

  return global_state.num_processes, global_state.process_id


def _end_process(who: str, error: BaseException) -> None:
  """Ends the process without the barrier that an ordinary end waits at."""
  text = " ".join(str(error).split())
  if isinstance(error, SystemExit):
    reason = text
  else:
    reason = f"{type(error).__name__}: {text}"
    if isinstance(error, jax.errors.JaxRuntimeError) and any(
      word in text for word in _LOST
    ):
      reason = f"another process died, stalled or was cut off ({reason})"
    else:
      traceback.print_exception(error)
  sys.stdout.flush()
  print(f"{who} ended: {reason}", file=sys.stderr, flush=True)
  os._exit(1)
