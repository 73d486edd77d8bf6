r"""How far gradients with compressed residuals are from those without.

  python -m experiments.residuals.equality \
    --json=docs/results/residuals_equality.jsonl

Every network in its full depth, small in width, image and batch, runs on JAX's
backend. The error of a gradient is its distance to the gradient of plain
training in float64, over the length of that; the lossless cut is computed in
float64 too. In float32 it may differ from plain training by as much as that is
off itself: a compiler fuses the two differently, and so sums in another order.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import rich.progress
import rich.table
from absl import app, flags

from experiments.common import records, shared_flags
from experiments.common.console import make_console
from experiments.residuals import cases, points
from jaxmotion.core import PyTree

_LOSSLESS = ("cut", "cut_together")
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

_NETWORKS = flags.DEFINE_list(
  "networks",
  list(_DEFAULT),
  "Networks, NAME:BATCH:OPTION=NUMBER.",
  allow_override=True,
)
_MODES = flags.DEFINE_list(
  "modes",
  ["plain", "cut", "cut_together", "cut_int8", "cut_int4"],
  "Of training.",
  allow_override=True,
)
_JSON = shared_flags.define_rows()


def compare(spec: points.Spec, modes: Sequence[str]) -> Iterator[records.Row]:
  """Runs one step in every mode; rows of how far its gradient is off.

  Args:
    spec: the network and its batch.
    modes: of `MODES` that return gradients; `plain` first.
  """
  net = spec.make()
  params = net.init(jax.random.key(0))
  batch = _some(*net.batch(spec.batch), np.random.default_rng(0))
  reference = _in_float64("plain", spec, params, batch)
  length = np.linalg.norm(reference)
  plain = None
  for mode in modes:
    ours = _flat(_gradient(mode, spec)(params, batch))
    error = float(np.linalg.norm(ours - reference) / length)
    case = f"{spec.case}/{mode}"
    plain = error if mode == "plain" else plain
    yield _row(case, "gradient_error", error, plain)
    if mode == "plain":
      first = ours
    else:
      apart = float(np.linalg.norm(ours - first) / length)
      yield _row(case, "gradient_from_plain", apart, None)
      yield _row(case, "values_equal", float(np.mean(ours == first)), None)
    if mode in _LOSSLESS:
      ours = _in_float64(mode, spec, params, batch)
      error = float(np.linalg.norm(ours - reference) / length)
      yield _row(case, "gradient_error_float64", error, None)


def _gradient(mode: str, spec: points.Spec) -> Any:
  fn = jax.jit(cases.job(mode, spec.make(), spec.batch).fn)
  return lambda params, batch: fn(params, batch)[1]


def _in_float64(
  mode: str, spec: points.Spec, params: PyTree, batch: PyTree
) -> np.ndarray:
  gradient = _gradient(mode, spec)
  with jax.enable_x64(True):
    return _flat(gradient(*jax.tree.map(_widen, (params, batch))))


def _some(inputs: Any, labels: Any, rng: np.random.Generator) -> PyTree:
  """Images or tokens, and classes."""
  if jnp.issubdtype(inputs.dtype, jnp.integer):
    given = rng.integers(0, 10, inputs.shape).astype(inputs.dtype)
  else:
    given = rng.normal(size=inputs.shape).astype(inputs.dtype)
  return given, rng.integers(0, 10, labels.shape).astype(labels.dtype)


def _widen(a: Any) -> Any:
  a = np.asarray(a)
  return a.astype(np.float64) if a.dtype == np.float32 else a


def _flat(tree: PyTree) -> np.ndarray:
  leaves = [np.asarray(a, np.float64).ravel() for a in jax.tree.leaves(tree)]
  return np.concatenate(leaves)


def _row(
  case: str, metric: str, value: float, plain: float | None
) -> records.Row:
  return records.Row(
    "residuals_equality",
    case,
    metric,
    value,
    "relative" if metric.startswith("gradient") else "of all",
    plain,
    value / plain if plain else None,
    None,
    records.describe_machine(),
    jax.__version__,
  )


def table(rows: Sequence[records.Row]) -> rich.table.Table:
  """A line for each network and mode."""
  made = rich.table.Table(title="gradients of the first step")
  for name in (
    "network, mode",
    "from float64",
    "of plain's",
    "from plain",
    "equal bits",
    "both in float64",
  ):
    made.add_column(name)
  found = {(row.case, row.metric): row for row in rows}
  for case in dict.fromkeys(row.case for row in rows):
    error = found[case, "gradient_error"]
    cells = [f"{error.value:.2e}", f"{error.ratio:.2f}"]
    if (case, "values_equal") in found:
      cells += [
        f"{found[case, 'gradient_from_plain'].value:.2e}",
        f"{found[case, 'values_equal'].value:.1%}",
      ]
    if (case, "gradient_error_float64") in found:
      cells += [f"{found[case, 'gradient_error_float64'].value:.2e}"]
    made.add_row(case, *cells)
  return made


def main() -> None:
  """Runs all networks; prints a table and writes rows."""
  if _MODES.value[:1] != ["plain"]:
    raise app.UsageError(
      f"`--modes` must begin with plain, got {_MODES.value}."
    )
  console, rows = make_console(), list[records.Row]()
  specs = points.parse(_NETWORKS.value)
  for spec in rich.progress.track(specs, "run", console=console):
    rows += compare(spec, _MODES.value)
    if _JSON.value:
      records.write_rows(_JSON.value, rows)
  console.print(table(rows))


if __name__ == "__main__":
  shared_flags.run_main(main)
