"""Compiles an optimiser's update for a GPU and says where its state is.

  JAX_PLATFORMS=cpu python -m experiments.state \\
    --json=docs/results/state_compiled.jsonl

Compiled, not run: no GPU is needed, but the extra `cuda-compile`. Adam over
equal float32 matrices, its state plain or packed (`memory.compress_state`).

On the device, one step with everything donated:
  argument_bytes  of parameters, gradients and state;
  temp_bytes      of all in between;
  traffic_bytes   that its kernels read and write.
On the host between steps (two steps in a loop that carries the state in pinned
memory, for arguments of a program that is only compiled are on the device):
  temp_bytes      on the device, the state that is on its way included;
                  baseline: of the naive loop, which brings all of the state
                  and puts all of it back, in no order.
"""

import dataclasses
import functools
import sys
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import optax
from absl import flags
from rich.table import Table

from experiments import gpu_compile
from experiments.common import records, shared_flags
from experiments.common.console import make_console
from jaxmotion import codecs, memory
from jaxmotion.core import PyTree

_LEAVES = flags.DEFINE_integer("leaves", 16, "Matrices.", allow_override=True)
_WIDTH = flags.DEFINE_integer("matrix_width", 2048, "Rows and columns of each.")
_GPU = flags.DEFINE_enum(
  "gpu", "H100", list(gpu_compile.GPUS), "To compile for.", allow_override=True
)
_JSON = shared_flags.define_rows()

PACKINGS: dict[str, dict[str, Any]] = {
  "plain": {"first": codecs.identity(), "second": codecs.identity()},
  "packed": {},
}


def step_on_device(
  tx: optax.GradientTransformation, params: PyTree, grads: PyTree, state: PyTree
) -> tuple[PyTree, PyTree]:
  """One step; returns the parameters and the state."""
  updates, state = tx.update(grads, state, params)
  return optax.apply_updates(params, updates), state


def steps_on_host(
  tx: optax.GradientTransformation,
  naive: bool,
  params: PyTree,
  grads: PyTree,
  state: PyTree,
) -> tuple[PyTree, PyTree]:
  """Two steps with the state on the host between them."""

  def step(carry: tuple[PyTree, PyTree], _: None) -> tuple[Any, None]:
    params, state = carry
    state = _move(state, jax.memory.Space.Device) if naive else state
    params, state = step_on_device(tx, params, grads, state)
    state = _move(state, jax.memory.Space.Host) if naive else state
    return (params, state), None

  carry = params, _move(state, jax.memory.Space.Host)
  return jax.lax.scan(step, carry, None, length=2)[0]


def _move(state: PyTree, space: Any) -> PyTree:
  """Returns the state with what is encoded in another memory."""

  def moved(x: Any) -> Any:
    if not isinstance(x, memory.EncodedLeaf):
      return x
    payload = jax.tree.map(lambda a: jax.device_put(a, space), x.payload)
    return dataclasses.replace(x, payload=payload)

  one = lambda x: isinstance(x, memory.EncodedLeaf)
  return jax.tree.map(moved, state, is_leaf=one)


def programs() -> Iterator[tuple[str, Callable[..., Any], Any, tuple]]:
  """Yields (case, function, optimiser, arguments to donate)."""
  for name, options in PACKINGS.items():
    adam = optax.adam(1e-3)
    tx = memory.compress_state(adam, min_leaf_size=0, **options)
    there = memory.compress_state(
      adam, min_leaf_size=0, memory_kind="pinned_host", **options
    )
    yield name, functools.partial(step_on_device, tx), tx, (0, 2)
    naive = functools.partial(steps_on_host, tx, True)
    yield f"{name}_host_naive", naive, tx, (0,)
    ours = functools.partial(steps_on_host, there, False)
    yield f"{name}_host", ours, there, (0,)


def compile_all(leaves: int, width: int, gpu: str) -> Iterator[tuple[str, Any]]:
  """Yields (case, what the compiler made of it)."""
  like = jax.ShapeDtypeStruct((width, width), jnp.float32)
  params = {f"layer{i:03d}": like for i in range(leaves)}
  for case, fn, tx, donated in programs():
    # Their shapes alone: where they are is no part of what is compiled.
    state = jax.tree.map(
      lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype),
      jax.eval_shape(tx.init, params),
    )
    args = params, params, state
    yield (
      case,
      gpu_compile.compile_for(fn, *args, gpu=gpu, donate_argnums=donated),
    )


def rows(leaves: int, width: int, gpu: str) -> Iterator[records.Row]:
  """Yields the measurements."""
  found: dict[tuple[str, str], int] = {}
  for case, made in compile_all(leaves, width, gpu):
    on_host = "host" in case
    metrics = ["temp_bytes"]
    if not on_host:
      metrics = ["argument_bytes", "temp_bytes", "traffic_bytes"]
    for metric in metrics:
      value = getattr(made, metric)
      found[case, metric] = value
      baseline = None
      if on_host:
        baseline = found.get((f"{case}_naive", metric))
      elif case != "plain" and metric != "temp_bytes":
        baseline = found["plain", metric]
      ratio = value / baseline if baseline else None
      yield records.Row(
        "state_compiled",
        f"adam/{leaves}x{width}x{width}/{case}",
        metric,
        value,
        "bytes",
        baseline,
        ratio,
        None,
        f"compiled, not run: {made.gpu}, {made.memory_gib:g} GiB",
        jax.__version__,
      )


def main() -> None:
  """Compiles, prints and writes."""
  gpu_compile.stay_on_the_host()
  if why := gpu_compile.refusal():
    sys.exit(f"Nothing can be compiled for a GPU: {why}.")
  found = list(rows(_LEAVES.value, _WIDTH.value, _GPU.value))
  table = Table("case", "metric", "MiB", "ratio", title=found[0].machine)
  for row in found:
    ratio = "" if row.ratio is None else f"{row.ratio:.3f}"
    value = float(row.value) / 2**20
    table.add_row(row.case, row.metric, f"{value:.1f}", ratio)
  make_console().print(table)
  if _JSON.value:
    records.write_rows(_JSON.value, found)


if __name__ == "__main__":
  shared_flags.run_main(main)
