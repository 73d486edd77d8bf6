"""Checks of optimizers, also of those that update one part after another."""

import jax
import optax

from jaxmotion import core, program
from jaxmotion.core import PyTree

transformation = core.instance(
  optax.GradientTransformation, "an optax.GradientTransformation"
)


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
  # The marks of a value: positions of the gradients that it depends on. Results
  # of a step depend on whatever its operands do.
  count = len(paths)
  marks = [
    frozenset({i} if i < count else ()) for i in range(len(traced.in_avals))
  ]
  join = lambda step, ins: [frozenset().union(*ins)] * len(step.outs)
  for i, read in enumerate(program.follow_marks(traced, marks, join)):
    if others := read - {i}:
      raise ValueError(
        "`tx` must update each array from the array's own gradient, because "
        f"the gradients of one {part} are gone before those of the next exist, "
        f"but the update of `{paths[i]}` reads the gradient of "
        f"`{paths[min(others)]}`, as in `optax.clip_by_global_norm`: clip each "
        "array by its own norm with `optax.clip_by_block_rms` or "
        "`optax.adaptive_grad_clip`."
      )
