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
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import rich.progress

from experiments.common import list_flags, records, shared_flags
from experiments.common.console import make_console
from experiments.common.records import read_cases
from experiments.residuals import (
  cases,
  networks,
  rows as residuals_rows,
  tables,
)
from jaxmotion.core import PyTree

_EXPERIMENT = f"{residuals_rows.EXPERIMENT}_equality"
_LOSSLESS = ("cut", "cut_together")


def compare_gradients(
  spec: networks.NetworkSpec, modes: Sequence[str]
) -> Iterator[list[records.Row]]:
  """Runs one step in every mode and yields the rows of its gradient."""
  # All distances are relative to the length of plain training's float64
  # gradient, and the baseline of errors is plain training in float32.
  net = spec.make_network()
  params = net.init(jax.random.key(0))
  batch = _draw_batch(*net.batch(spec.batch), np.random.default_rng(0))
  exact = _compute_in_float64("plain", spec, params, batch)
  length = np.linalg.norm(exact)

  def distance(a: np.ndarray, b: np.ndarray) -> records.Measured:
    return records.Measured(float(np.linalg.norm(a - b) / length), "relative")

  plain = _flatten_leaves(_make_gradient("plain", spec)(params, batch))
  base = {"gradient_error": distance(plain, exact)}
  for mode in modes:
    figures = base
    if mode != "plain":
      ours = _flatten_leaves(_make_gradient(mode, spec)(params, batch))
      figures = {
        "gradient_error": distance(ours, exact),
        "gradient_from_plain": distance(ours, plain),
        "values_equal": records.Measured(
          float(np.mean(ours == plain)), "of all"
        ),
      }
    if mode in _LOSSLESS:
      in_float64 = _compute_in_float64(mode, spec, params, batch)
      figures["gradient_error_float64"] = distance(in_float64, exact)
    cases_of = {f"{spec.case}/{mode}": figures}
    yield records.make_rows(_EXPERIMENT, cases_of, base)


def _make_gradient(
  mode: str, spec: networks.NetworkSpec
) -> Callable[..., PyTree]:
  step = cases.build_step(mode, spec.make_network(), spec.batch)
  fn = jax.jit(step.fn)
  return lambda params, batch: fn(params, batch)[1]


def _compute_in_float64(
  mode: str, spec: networks.NetworkSpec, params: PyTree, batch: PyTree
) -> np.ndarray:
  gradient = _make_gradient(mode, spec)
  with jax.enable_x64(True):
    wide = jax.tree.map(_widen_array, (params, batch))
    return _flatten_leaves(gradient(*wide))


def _draw_batch(inputs: Any, labels: Any, rng: np.random.Generator) -> PyTree:
  """Returns random images or tokens, and classes from 0 to 9."""
  if jnp.issubdtype(inputs.dtype, jnp.integer):
    drawn = rng.integers(0, 10, inputs.shape).astype(inputs.dtype)
  else:
    drawn = rng.normal(size=inputs.shape).astype(inputs.dtype)
  return drawn, rng.integers(0, 10, labels.shape).astype(labels.dtype)


def _widen_array(a: Any) -> np.ndarray:
  a = np.asarray(a)
  return a.astype(np.float64) if a.dtype == np.float32 else a


def _flatten_leaves(tree: PyTree) -> np.ndarray:
  leaves = [np.asarray(a, np.float64).ravel() for a in jax.tree.leaves(tree)]
  return np.concatenate(leaves)


_SMALL = ("vgg16", "googlenet", "squeezenet", "nin")
_DEFAULT = (
  "alexnet:4:image=67:width=0.125",
  *(f"{name}:4:image=32:width=0.125" for name in _SMALL),
  *(f"resnet{n}:4:image=32:width=0.125" for n in (50, 101, 152)),
  "inception_v4:4:image=75:width=0.125",
  *(f"resnet{n}:2:image=32:width=0.0625" for n in (1001, 1517, 2504)),
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
_FRESH = shared_flags.define_fresh()
_JSON = shared_flags.define_rows()


def main() -> None:
  """Compares all networks, prints the table and writes rows."""
  modes = list(dict.fromkeys(["plain", *_MODES.value]))
  console, kept = make_console(), read_cases(_JSON.value)
  for spec in rich.progress.track(_NETWORKS.value, "run", console=console):
    names = [f"{spec.case}/{mode}" for mode in modes]
    known = [
      residuals_rows.are_current(kept.get(name, []), None) for name in names
    ]
    if all(known) and not _FRESH.value:
      continue
    for name, found in zip(names, compare_gradients(spec, modes), strict=True):
      kept[name] = residuals_rows.stamp_rows(found, None)
    records.write_rows(_JSON.value, itertools.chain(*kept.values()))
  rows = list(itertools.chain(*kept.values()))
  console.print(tables.equality_table(rows).to_console())


if __name__ == "__main__":
  shared_flags.run_main(main)
