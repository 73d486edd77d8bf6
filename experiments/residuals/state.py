"""Compiles an optimizer's update for a GPU and prints where its state is.

  JAX_PLATFORMS=cpu python -m experiments.residuals.state \\
    --json=docs/results/state_compiled.jsonl

Compiled, not run: no GPU is needed, but the extra `cuda-compile`. Adam, Adagrad
and Adafactor (with momentum) over equal float32 matrices, with plain state or
with state that `memory.compress_state` encodes (`packed`).

State on the device, one step with everything donated:
  argument_bytes  parameters, gradients and state;
  temp_bytes      temporaries;
  traffic_bytes   bytes that the kernels read and write.
State of Adam in pinned host memory, two steps in a loop:
  temp_bytes      temporaries on the device, the state in transfer included;
                  baseline: the naive loop, which fetches the whole state and
                  puts it back, in no order.
"""

import dataclasses
import functools
import itertools
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from absl import flags

from experiments import gpu_compile
from experiments.common import console, records, shared_flags
from experiments.common.records import Measured, Row
from experiments.common.tables import Table
from jaxmotion import codecs, memory
from jaxmotion.core import PyTree

PACKINGS: dict[str, dict[str, Any]] = {
  "plain": dict.fromkeys(("first", "second", "sums"), codecs.identity()),
  "packed": {},
}
"""Arguments of `memory.compress_state` by the name of the packing."""

OPTIMIZERS: dict[str, optax.GradientTransformation] = {
  "adam": optax.adam(1e-3),
  "adagrad": optax.adagrad(1e-2),
  "adafactor": optax.adafactor(
    1e-3, momentum=0.9, multiply_by_parameter_scale=False
  ),
}
"""Optimizers by name; the first one's state is also kept on the host."""


class UpdateProgram(NamedTuple):
  """A program that updates parameters."""

  optimizer: str  # Name of the optimizer, a key of `OPTIMIZERS`.
  case: str  # Name of the packing and of the place of the state.
  fn: Callable[..., Any]  # Function of parameters, gradients and state.
  tx: optax.GradientTransformation  # Optimizer that initializes the state.
  donated: tuple[int, ...]  # Positions of donated arguments.


def list_programs() -> Iterator[UpdateProgram]:
  """Yields the programs: state on the device, on the host naively, and ours."""
  for (optimizer, tx), (name, options) in itertools.product(
    OPTIMIZERS.items(), PACKINGS.items()
  ):
    on_device = memory.compress_state(tx, min_leaf_size=0, **options)
    step = functools.partial(step_on_device, on_device)
    yield UpdateProgram(optimizer, name, step, on_device, (0, 2))
    if optimizer != next(iter(OPTIMIZERS)):
      continue
    on_host = memory.compress_state(
      tx, min_leaf_size=0, memory_kind="pinned_host", **options
    )
    naive = functools.partial(step_on_host, on_device, True)
    yield UpdateProgram(optimizer, f"{name}_host_naive", naive, on_device, (0,))
    ours = functools.partial(step_on_host, on_host, False)
    yield UpdateProgram(optimizer, f"{name}_host", ours, on_host, (0,))


def step_on_device(
  tx: optax.GradientTransformation, params: PyTree, grads: PyTree, state: PyTree
) -> tuple[PyTree, PyTree]:
  """Runs one step and returns the parameters and the state."""
  updates, state = tx.update(grads, state, params)
  return optax.apply_updates(params, updates), state


def step_on_host(
  tx: optax.GradientTransformation,
  naive: bool,
  params: PyTree,
  grads: PyTree,
  state: PyTree,
) -> tuple[PyTree, PyTree]:
  """Runs two steps with the state in host memory between them."""
  # A scan carries the state, because the arguments of a program that is only
  # compiled are on the device.

  def step(carry: tuple[PyTree, PyTree], _: None) -> tuple[Any, None]:
    params, state = carry
    state = _move_state(state, jax.memory.Space.Device) if naive else state
    params, state = step_on_device(tx, params, grads, state)
    state = _move_state(state, jax.memory.Space.Host) if naive else state
    return (params, state), None

  carry = params, _move_state(state, jax.memory.Space.Host)
  return jax.lax.scan(step, carry, None, length=2)[0]


def _move_state(state: PyTree, space: Any) -> PyTree:
  """Returns the state with its encoded leaves in another memory."""

  def move_leaf(x: Any) -> Any:
    if not isinstance(x, memory.EncodedLeaf):
      return x
    payload = jax.tree.map(lambda a: jax.device_put(a, space), x.payload)
    return dataclasses.replace(x, payload=payload)

  is_encoded = lambda x: isinstance(x, memory.EncodedLeaf)
  return jax.tree.map(move_leaf, state, is_leaf=is_encoded)


def compile_all(
  leaves: int, width: int, gpu: str
) -> Iterator[tuple[str, str, gpu_compile.Compiled]]:
  """Yields each optimizer, case and its compiled program."""
  like = jax.ShapeDtypeStruct((width, width), jnp.float32)
  params = {f"layer{i:03d}": like for i in range(leaves)}
  for optimizer, case, fn, tx, donated in list_programs():
    # Shapes without shardings: memory kinds of arguments are not compiled.
    state = jax.tree.map(
      lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype),
      jax.eval_shape(tx.init, params),
    )
    args = params, params, state
    yield (
      optimizer,
      case,
      gpu_compile.compile_for(fn, *args, gpu=gpu, donate_argnums=donated),
    )


def make_rows(
  found: Iterable[tuple[str, str, gpu_compile.Compiled]],
  leaves: int,
  width: int,
) -> Iterator[Row]:
  """Yields the rows of all cases."""
  # The baseline of state on the host is the naive loop, that of encoded state
  # on the device is plain state.
  known: dict[tuple[str, str, str], int] = {}
  for optimizer, case, program in found:
    on_host = "host" in case
    values: dict[str, int | None] = {
      "argument_bytes": program.memory.argument_size_in_bytes,
      "temp_bytes": program.memory.temp_size_in_bytes,
      "traffic_bytes": program.traffic_bytes,
    }
    if on_host:
      values = {"temp_bytes": values["temp_bytes"]}
    for metric, value in values.items():
      assert value is not None, f"{metric} of {case} is unknown"
      known[optimizer, case, metric] = value
      baseline = None
      if on_host:
        baseline = known.get((optimizer, f"{case}_naive", metric))
      elif case != "plain" and metric != "temp_bytes":
        baseline = known[optimizer, "plain", metric]
      machine = f"{program.gpu.kind}, {program.gpu.memory_gib:g} GiB"
      yield records.make_row(
        "state_compiled",
        f"{optimizer}/{leaves}x{width}x{width}/{case}",
        metric,
        Measured(value, "bytes"),
        baseline,
        machine=f"compiled, not run: {machine}",
      )


def summary_table(rows: Sequence[Row]) -> Table:
  """Returns the MiB of every case and metric, with ratios to baselines."""
  lines = [
    (
      row.case,
      row.metric,
      f"{float(row.value) / 2**20:.1f}",
      "" if row.ratio is None else f"{row.ratio:.3f}",
    )
    for row in rows
  ]
  return Table(
    ("case", "metric", "MiB", "ratio"),
    lines,
    title=rows[0].machine,
    text_columns=(0, 1),
  )


_LEAVES, _WIDTH = 16, 2048  # Matrices; rows and columns of each.
_GPU = flags.DEFINE_enum(
  "gpu",
  "H100",
  list(gpu_compile.GPUS),
  "GPU to compile for.",
  allow_override=True,
)
_JSON = shared_flags.define_rows()


def main() -> None:
  """Compiles the updates, prints the table and writes rows."""
  gpu_compile.stay_on_host()
  if why := gpu_compile.explain_refusal():
    sys.exit(f"Nothing can be compiled for a GPU: {why}.")
  found = compile_all(_LEAVES, _WIDTH, _GPU.value)
  rows = list(make_rows(found, _LEAVES, _WIDTH))
  console.make_console().print(summary_table(rows).to_console())
  records.write_rows(_JSON.value, rows)


if __name__ == "__main__":
  shared_flags.run_main(main)
