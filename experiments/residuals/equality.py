r"""Compares gradients with compressed residuals with plain gradients.

  python -m experiments.residuals.equality \
    --json=docs/results/residuals_equality.jsonl

Every network runs in its full depth, small in width, image and batch, on JAX's
backend. The error of a gradient is its distance to the gradient of plain
training in float64, relative to the length of that. The lossless cut also runs
in float64. In float32 it may differ from plain training by plain training's own
error: XLA fuses the two differently, and so sums in another order. Networks in
--json of the same sources, machine and JAX are not run again, unless with
--fresh; rows of other networks stay.
"""

import itertools

import rich.progress
from absl import flags

from experiments.common import list_flags, records, shared_flags
from experiments.common.console import make_console
from experiments.common.kept import read_cases
from experiments.residuals import cases, gradients, networks, tables
from experiments.residuals.rows import (
  are_current,
  make_equality_rows,
  stamp_rows,
)

_SMALL = "image=32:width=0.125"
_DEEP = "image=32:width=0.0625"
_DEFAULT = (
  "alexnet:4:image=67:width=0.125",
  f"vgg16:4:{_SMALL}",
  f"googlenet:4:{_SMALL}",
  f"squeezenet:4:{_SMALL}",
  f"nin:4:{_SMALL}",
  f"resnet50:4:{_SMALL}",
  f"resnet101:4:{_SMALL}",
  f"resnet152:4:{_SMALL}",
  "inception_v4:4:image=75:width=0.125",
  f"resnet1001:2:{_DEEP}",
  f"resnet1517:2:{_DEEP}",
  f"resnet2504:2:{_DEEP}",
  "gpt:2:length=64:width=0.125:heads=2",
)

_NETWORKS = list_flags.define_items(
  "networks",
  _DEFAULT,
  networks.parse_network,
  "Networks and batches, NAME:BATCH:OPTION=NUMBER.",
)
_MODES = list_flags.define_names(
  "modes",
  ["cut", "cut_together", "cut_int8", "cut_int4"],
  cases.GRADIENT_MODES,
  "Modes of training, beside plain.",
)
_FRESH = flags.DEFINE_bool(
  "fresh", False, "Measure again what is in --json.", allow_override=True
)
_JSON = shared_flags.define_rows()


def main() -> None:
  """Compares all networks, prints the table and writes rows."""
  modes = list(dict.fromkeys(["plain", *_MODES.value]))
  console, kept = make_console(), read_cases(_JSON.value)
  for spec in rich.progress.track(_NETWORKS.value, "run", console=console):
    names = [f"{spec.case}/{mode}" for mode in modes]
    known = [are_current(kept.get(name, []), None) for name in names]
    if all(known) and not _FRESH.value:
      continue
    for name, found in zip(
      names, gradients.compare_gradients(spec, modes), strict=True
    ):
      kept[name] = stamp_rows(make_equality_rows(found), None)
    if _JSON.value:
      records.write_rows(_JSON.value, itertools.chain(*kept.values()))
  rows = list(itertools.chain(*kept.values()))
  console.print(tables.equality_table(rows).to_console())


if __name__ == "__main__":
  shared_flags.run_main(main)
