"""Measures this machine and writes a platform for `jaxmotion.perfmodel`.

  python -m experiments.perfmodel.calibrate --platform=results/here.json

It times matmuls, convolutions, elementwise passes, reductions, codecs and
collectives, each at sizes equally far apart in their logarithms. All devices
work at once, as they do in a step. Sizes alternate, so that a slow minute of
the machine falls on all alike. A size takes the lower quartile of its repeats
(other processes only add to it), less the time of calling an empty program. The
platform keeps the measurements, beside the line of least relative error through
them, which gives rates and latencies.

Emulated devices (`--xla_force_host_platform_device_count` in XLA_FLAGS) share
the cores of this machine: their sources say that they are emulated.
"""

import jax
from absl import flags

from experiments.common import records, shared_flags
from experiments.common.console import make_console
from experiments.perfmodel.calibration import calibrate_platform
from experiments.perfmodel.probes import CODECS
from experiments.perfmodel.rows import calibration_rows
from experiments.perfmodel.tables import calibration_table
from jaxmotion import perfmodel

_PLATFORM = shared_flags.define_output(
  "platform", "Where to write the platform (JSON)."
)
_JSON = shared_flags.define_rows()
_AXIS = flags.DEFINE_string(
  "axis", "data", "Name of the axis of devices.", allow_override=True
)
_WORKERS = flags.DEFINE_integer(
  "workers", None, "Number of devices; all by default.", 1
)
_SIZES = flags.DEFINE_integer(
  "sizes", 8, "Number of sizes of each operation.", 2
)
_REPEATS = flags.DEFINE_integer(
  "repeats", 20, "Repeats of each size.", 1, allow_override=True
)
_LARGEST = flags.DEFINE_integer(
  "largest", 1 << 23, "Elements of the largest array.", 1 << 12
)
_CODECS = flags.DEFINE_list("codecs", list(CODECS), "Codecs to time.")


def main() -> None:
  """Measures, prints the table, writes the platform and the rows."""
  platform = calibrate_platform(
    _AXIS.value,
    _WORKERS.value or jax.device_count(),
    _CODECS.value,
    _LARGEST.value,
    _SIZES.value,
    _REPEATS.value,
  )
  make_console().print(calibration_table(platform).to_console())
  if _PLATFORM.value:
    perfmodel.save_platform(platform, _PLATFORM.value)
  if _JSON.value:
    records.write_rows(_JSON.value, calibration_rows(platform))


if __name__ == "__main__":
  shared_flags.run_main(main)
