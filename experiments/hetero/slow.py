"""A loss whose worker is slowed by real extra work, and a clock for it."""

import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax

from experiments.train.tasks import Batch, Task
from jaxmotion import hetero

Params = Any


def make_loss(
  task: Task,
) -> Callable[[Params, Batch], tuple[jax.Array, jax.Array]]:
  """Returns (params, microbatch) -> (total, count).

  A microbatch with `repeats` of r is computed r times, forwards and backwards,
  of which the last counts.
  """
  graph = nnx.graphdef(task.build(0))

  def once(params: Params, batch: Batch) -> jax.Array:
    return task.loss(nnx.merge(graph, params), batch)

  def loss(params: Params, batch: Batch) -> tuple[jax.Array, jax.Array]:
    still = lax.stop_gradient(params)

    def again(_: Any, pixels: jax.Array) -> jax.Array:
      grads = jax.grad(once)(still, batch | {"pixels": pixels})
      # Zero, which no compiler may know: the work has to be done in turn.
      return pixels + 0.0 * sum(jnp.sum(g) for g in jax.tree.leaves(grads))

    pixels = lax.fori_loop(1, batch["repeats"], again, batch["pixels"])
    mean = once(params, batch | {"pixels": pixels})
    weight = jnp.asarray(batch["weight"])
    return mean * weight, weight

  return loss


@jax.jit
def _add(a: Any, b: Any) -> Any:
  return jax.tree.map(jnp.add, a, b)


def take_turns(
  uneven: hetero.UnevenStep,
  state: hetero.UnevenState,
  batch: Batch,
  counts: Sequence[int],
) -> tuple[Any, np.ndarray]:
  """Does a step's work one worker after the other, and times each.

  The same compiled program runs once for each worker, with no work for the
  others: emulated workers share the machine's cores, so that together none of
  them would have the time it has alone.

  Args:
    uneven: of `hetero.uneven_data_parallel`.
    state: of training.
    batch: of a step.
    counts: microbatches of each worker.

  Returns:
    What `uneven.work` returns, and the seconds of each worker.
  """
  parts, seconds = [], np.zeros(len(counts))
  for worker in range(len(counts)):
    alone = np.where(np.arange(len(counts)) == worker, counts, 0)
    begin = time.perf_counter()
    parts.append(jax.block_until_ready(uneven.work(state, batch, alone)))
    seconds[worker] = time.perf_counter() - begin
  work = parts[0]
  for part in parts[1:]:
    work = _add(work, part)
  return work, seconds
