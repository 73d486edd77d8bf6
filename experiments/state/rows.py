"""Rows of compiled updates: memory, and bytes that the kernels move."""

from collections.abc import Iterable, Iterator

import jax

from experiments import gpu_compile
from experiments.common import records


def make_rows(
  found: Iterable[tuple[str, str, gpu_compile.Compiled]],
  leaves: int,
  width: int,
) -> Iterator[records.Row]:
  """Yields the rows of all cases."""
  # The baseline of state on the host is the naive loop, that of encoded state
  # on the device is plain state.
  known: dict[tuple[str, str, str], int] = {}
  for optimizer, case, program in found:
    on_host = "host" in case
    values: dict[str, int | None] = {
      "temp_bytes": program.memory.temp_size_in_bytes
    }
    if not on_host:
      values = {
        "argument_bytes": program.memory.argument_size_in_bytes,
        "temp_bytes": program.memory.temp_size_in_bytes,
        "traffic_bytes": program.traffic_bytes,
      }
    for metric, value in values.items():
      assert value is not None, f"{metric} of {case} is unknown"
      known[optimizer, case, metric] = value
      baseline = None
      if on_host:
        baseline = known.get((optimizer, f"{case}_naive", metric))
      elif case != "plain" and metric != "temp_bytes":
        baseline = known[optimizer, "plain", metric]
      yield records.Row(
        "state_compiled",
        f"{optimizer}/{leaves}x{width}x{width}/{case}",
        metric,
        value,
        "bytes",
        baseline,
        value / baseline if baseline else None,
        None,
        f"compiled, not run: {program.gpu.kind}, {program.gpu.memory_gib:g}"
        " GiB",
        jax.__version__,
      )
