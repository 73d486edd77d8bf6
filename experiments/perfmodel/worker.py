"""Worker process that calibrates and runs steps on a host or emulated devices.

Commands come one JSON object per line, to all hosts alike:

  {"do": "calibrate", "options": {...}}    -> {"calibrating": true}
  {"do": "prepare", "cases": [CASE, ...]}  -> {"prepared": N}
  {"do": "run", "steps": N}                -> {"seconds": [[...], ...]}
  {"do": "platform"}                       -> {"platform": {...}}
  {"do": "quit"}                           -> exit code 0

A run takes N steps of every case and, after "calibrate", times every probe N
times: a slow minute of the machine falls on both alike.
"""

import argparse
import json
import queue
import time
from collections.abc import Callable

import jax
from jax.experimental import multihost_utils

from experiments.common import records
from experiments.hosts import jax_worker, worker
from experiments.perfmodel import cases, codecs
from experiments.perfmodel.steps import compile_step
from jaxmotion import perfmodel
from jaxmotion.calibration.extend import (
  ProbeTimer,
  make_mesh,
  make_platform,
  prepare_timer,
)

_WARM_UP = 2


def _parse_arguments() -> argparse.Namespace:
  parser = worker.make_parser(__doc__)
  parser.add_argument("--devices", type=int, required=True, help="of a host")
  return parser.parse_args()


def _barrier() -> None:
  if jax.process_count() > 1:
    multihost_utils.sync_global_devices("validation")


def _answer_commands(commands: "queue.Queue[str]", reply: worker.Reply) -> None:
  """Answers the parent's commands until it says "quit"."""
  runs: list[Callable[[], None]] = []
  timer: ProbeTimer | None = None
  workers = jax.device_count()
  while True:
    match json.loads(commands.get()):
      case {"do": "calibrate", "options": options}:
        chosen = [codecs.CODECS[name] for name in options.pop("codecs")]
        timer = prepare_timer(workers, chosen, barrier=_barrier, **options)
        reply({"calibrating": True})
      case {"do": "platform"}:
        assert timer is not None
        platform = make_platform(
          records.describe_machine(), "data", workers, *timer.make_curves()
        )
        reply({"platform": perfmodel.platform_to_dict(platform)})
      case {"do": "prepare", "cases": given}:
        mesh = make_mesh(workers)
        runs = [compile_step(mesh, cases.Case(*case)) for case in given]
        for run in runs:
          for _ in range(_WARM_UP):
            run()
        reply({"prepared": len(runs)})
      case {"do": "run", "steps": steps}:
        if timer is not None:
          for _ in range(steps):
            timer.run_round()
        reply({"seconds": [_time_steps(run, steps) for run in runs]})
      case {"do": "quit"}:
        return
      case other:
        raise ValueError(f"a command must say what to do, got {other}")


def _time_steps(run: Callable[[], None], steps: int) -> list[float]:
  """Returns the seconds of each run, started on all hosts together."""
  _barrier()
  seconds = []
  for _ in range(steps):
    begin = time.perf_counter()
    run()
    seconds.append(time.perf_counter() - begin)
  return seconds


def main() -> None:
  """Serves the parent process until its "quit" command."""
  arguments = _parse_arguments()
  connect = lambda: jax_worker.connect_hosts(arguments, arguments.devices)
  worker.converse_with_parent(connect, _answer_commands)


if __name__ == "__main__":
  main()
