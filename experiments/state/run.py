"""Compiles the update of an optimizer for a GPU, in every case."""

from collections.abc import Iterator

import jax
import jax.numpy as jnp

from experiments import gpu_compile
from experiments.state import cases


def compile_all(
  leaves: int, width: int, gpu: str
) -> Iterator[tuple[str, str, gpu_compile.Compiled]]:
  """Yields each optimizer, case and its compiled program."""
  like = jax.ShapeDtypeStruct((width, width), jnp.float32)
  params = {f"layer{i:03d}": like for i in range(leaves)}
  for optimizer, case, fn, tx, donated in cases.list_programs():
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
