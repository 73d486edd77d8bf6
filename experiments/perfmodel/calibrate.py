"""Measures this machine and writes a platform for `jaxmotion.perfmodel`.

  python -m experiments.perfmodel.calibrate --platform=results/here.json

It is `jaxmotion calibrate` with a table of every curve, rows, and the codecs of
the experiments; `jaxmotion.calibration` says how operations are timed.

Emulated devices (`--xla_force_host_platform_device_count` in XLA_FLAGS) share
the cores of this machine: their sources say that they are emulated.
"""

import rich.progress
from absl import flags

from experiments.common import console, list_flags, records, shared_flags
from experiments.perfmodel import codecs, rows, tables
from jaxmotion import calibration, perfmodel

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
_CODECS = list_flags.define_names(
  "codecs", codecs.CODECS, codecs.CODECS, "Codecs to time.", least=0
)


def main() -> None:
  """Measures, prints the table, writes the platform and the rows."""
  chosen = [codecs.CODECS[name] for name in _CODECS.value]
  with rich.progress.Progress(console=console.make_console()) as bar:
    task = bar.add_task("calibrating", total=_REPEATS.value)
    platform = calibration.calibrate_platform(
      records.describe_machine(),
      axis=_AXIS.value,
      workers=_WORKERS.value,
      codecs=chosen,
      largest=_LARGEST.value,
      sizes=_SIZES.value,
      repeats=_REPEATS.value,
      report=lambda done: bar.update(task, completed=done),
    )
  console.make_console().print(tables.calibration_table(platform).to_console())
  if _PLATFORM.value:
    perfmodel.save_platform(platform, _PLATFORM.value)
  records.write_rows(_JSON.value, rows.calibration_rows(platform))


if __name__ == "__main__":
  shared_flags.run_main(main)
