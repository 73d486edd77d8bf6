"""Loss that slows workers by real extra work, and the timing of workers."""

import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax

import jaxmotion
from experiments.train import tasks

Params = Any


def make_loss(task: tasks.Task) -> Callable[[Params, tasks.Batch], jax.Array]:
  """Returns the mean loss of a microbatch, computed several times."""
  # A microbatch with `repeats` of r is computed r times, forward and backward.
  # Only the last time counts.
  graph = nnx.graphdef(task.build(0))

  def mean_loss(params: Params, batch: tasks.Batch) -> jax.Array:
    return task.loss(nnx.merge(graph, params), batch)

  def slow_loss(params: Params, batch: tasks.Batch) -> jax.Array:
    frozen = lax.stop_gradient(params)

    def repeat_work(_: Any, pixels: jax.Array) -> jax.Array:
      grads = jax.grad(mean_loss)(frozen, batch | {"pixels": pixels})
      # Adds zero, but XLA cannot know that: each repeat needs the last one.
      return pixels + 0.0 * sum(jnp.sum(g) for g in jax.tree.leaves(grads))

    repeats = batch["repeats"][0]
    pixels = lax.fori_loop(1, repeats, repeat_work, batch["pixels"])
    return mean_loss(params, batch | {"pixels": pixels})

  return slow_loss


def weigh_microbatch(batch: tasks.Batch) -> jax.Array:
  """Returns the weight of a microbatch, which all its examples share."""
  return batch["weight"][0]


@jax.jit
def _add_trees(a: Any, b: Any) -> Any:
  return jax.tree.map(jnp.add, a, b)


def take_turns(
  compute: Callable[..., Any],
  state: jaxmotion.TrainState,
  batch: tasks.Batch,
  counts: Sequence[int],
) -> tuple[Any, np.ndarray]:
  """Does a step's work one worker after another, and times each worker."""
  # The same compiled program runs once for each worker, with no work for the
  # others. Emulated workers share the machine's cores: if they ran together,
  # each would take longer than alone.
  # Returns the work, as `compute` returns it, and the seconds of each
  # worker.
  parts, seconds = [], np.zeros(len(counts))
  for worker in range(len(counts)):
    alone = np.where(np.arange(len(counts)) == worker, counts, 0)
    begin = time.perf_counter()
    work = compute(state, batch, counts=alone)
    parts.append(jax.block_until_ready(work))
    seconds[worker] = time.perf_counter() - begin
  work = parts[0]
  for part in parts[1:]:
    work = _add_trees(work, part)
  return work, seconds
