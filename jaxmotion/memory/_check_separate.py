"""Check of optimizers that update one part of the parameters after another."""

from typing import Any

import jax
import optax
from jax.interpreters.partial_eval import dce_jaxpr

from jaxmotion import core
from jaxmotion.core import PyTree


def check_separate(
  tx: optax.GradientTransformation, params: PyTree, part: str
) -> None:
  """Raises if the update of one array reads the gradient of another."""
  params = jax.tree.map(core.abstract_like, params)
  paths = [path for path, _ in core.named_leaves(params)]
  state = jax.eval_shape(tx.init, params)
  traced = jax.make_jaxpr(lambda *args: tx.update(*args)[0])(
    params, state, params
  )
  if pair := _find_pair(traced.jaxpr, len(paths)):
    i, j = pair
    raise ValueError(
      "`tx` must update each array from the array's own gradient, because the"
      f" gradients of one {part} are gone before those of the next exist, but"
      f" the update of `{paths[i]}` reads the gradient of `{paths[j]}`, as in"
      " `optax.clip_by_global_norm`: clip each array by its own norm with"
      " `optax.clip_by_block_rms` or `optax.adaptive_grad_clip`."
    )


def _find_pair(jaxpr: Any, count: int) -> tuple[int, int] | None:
  """Returns an update and another's gradient that it reads, or None."""
  # Two positions differ in a bit. So it is enough to ask for each bit what the
  # updates with that bit read, and those without it: 2 log2(count) questions.

  def find_read(wanted: list[bool]) -> list[int]:
    read = dce_jaxpr(jaxpr, wanted)[1][:count]
    return [i for i in range(count) if read[i] and not wanted[i]]

  halves = [
    [(i >> bit) & 1 == value for i in range(count)]
    for bit in range((count - 1).bit_length() if count else 0)
    for value in (0, 1)
  ]
  if any(map(find_read, halves)):
    for i in range(count):
      if read := find_read([k == i for k in range(count)]):
        return i, read[0]
  return None
