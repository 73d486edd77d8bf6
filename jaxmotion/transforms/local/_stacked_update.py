"""Updates of one worker's own arrays, which XLA:CPU makes in their buffers."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jaxmotion import core, program
from jaxmotion.core import PyTree


def update_stacked(
  fun: Callable[..., PyTree], *args: PyTree
) -> tuple[PyTree, ...]:
  """Runs an update on one worker's own arrays, in place on CPU."""
  # fun: one worker's own arrays -> a tuple of trees. args: trees with a leading
  # axis of length 1, which the results have too.
  # XLA:CPU writes a result into the buffer of a donated array only if it reads
  # that array element by element. The view without the leading axis of workers
  # is no such read. So the results would be copied: all moments, at every step.
  # The update is therefore batched over the leading axis. Updates that branch,
  # loop or call kernels are not, because a batched branch runs both sides.
  own = [core.unpack_worker(core.PerWorker(tree)) for tree in args]
  jaxpr, shapes = jax.make_jaxpr(fun, return_shape=True)(*own)
  run = core.jax_core.jaxpr_as_fun(jaxpr)
  if _is_straight(jaxpr):
    results = jax.vmap(run)(*jax.tree.leaves(args))
  else:
    results = [jnp.expand_dims(a, 0) for a in run(*jax.tree.leaves(own))]
  made: tuple[PyTree, ...] = jax.tree.unflatten(
    jax.tree.structure(shapes), results
  )
  return made


def _is_straight(jaxpr: Any) -> bool:
  """Returns whether a program is without branches, loops and kernels."""
  return not any(
    program.inner_jaxprs(step.eqn) or "callback" in step.name
    for step in program.flatten(jaxpr, calls="all").steps
  )
