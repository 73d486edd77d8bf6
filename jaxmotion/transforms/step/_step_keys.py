"""Random keys of the workers of a data-parallel step."""

from typing import Any

import jax
import jax.numpy as jnp

from jaxmotion.core import Array
from jaxmotion.transforms.step import _run_on_workers


def check_step_key(key: Any) -> None:
  """Raises unless `key` is one key of `jax.random`, typed or raw."""
  if key is None:
    return
  dtype, shape = getattr(key, "dtype", None), getattr(key, "shape", None)
  if not (_run_on_workers.is_key(key) and shape == ()) and not (
    dtype == jnp.uint32 and shape is not None and len(shape) == 1
  ):
    found = f"{dtype}{list(shape)}" if shape is not None else f"{key!r:.200}"
    raise TypeError(
      f"`key` must be one key of jax.random.key(seed), got {found}."
    )


def make_worker_keys(key: Array, count: Array, workers: int) -> Array:
  """Returns the key of every worker in this step, shape (workers, ...)."""
  # It is `fold_in(fold_in(key, count), worker)`. `count`: int32[], steps so
  # far.
  key = jax.random.fold_in(key, count)
  fold = jax.vmap(jax.random.fold_in, in_axes=(None, 0))
  return fold(key, jnp.arange(workers))
