"""Gradient clipping inside of a sharded optimizer."""

from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax

from jaxmotion import core
from jaxmotion.core import Array, AxisName, PyTree


def clip_by_global_norm(
  max_norm: float, axis_name: AxisName
) -> optax.GradientTransformation:
  """Clips the mean gradient by its norm over all workers' parts.

  It is `optax.clip_by_global_norm` for the chain inside of `sharded`, where
  each worker has a part of the gradient. The workers add their sums of squares
  (one 4-byte sum). Leaves that all workers hold whole count once. So do shards
  of a model, which `specs` of `make_train_step` name, by a sum over its axes.

  Args:
    max_norm: greatest norm of the whole gradient, positive.
    axis_name: the axes that `sharded` was given.

  Returns:
    A transformation without state. Types tell it which leaves are parts, so
    its `update` runs inside a `shard_map` with `check_vma`.

  Raises:
    TypeError, ValueError: `max_norm` is no positive number, or `axis_name` no
      name. `update` raises a ValueError where types do not tell.

  Example:
    >>> from jaxmotion.transforms import sharded
    >>> clip = clip_by_global_norm(1.0, "data")
    >>> tx = sharded("data", optax.chain(clip, optax.adamw(3e-4)))
  """
  # Greater ones have no square in float32.
  core.check_number("max_norm", max_norm, 0, 2.0**63, open_low=True)
  axis_name = core.flatten_axes("axis_name", axis_name)

  def update_fn(
    updates: PyTree, state: Any, params: PyTree | None = None
  ) -> tuple[PyTree, Any]:
    core.check_arrays("updates", updates)
    core.check_arrays("params", params)
    core.check_instance(
      "state", state, optax.EmptyState, "what `init` returned"
    )
    core.axis_size(axis_name)
    if not core.tracks_varying(axis_name):
      raise ValueError(
        "`axis_name` must be an axis of a `jax.shard_map` with `check_vma=True`"
        f", where types tell which leaves are parts, got {axis_name!r}."
      )
    updates = jax.tree.map(jnp.asarray, updates)
    # Parts of workers, and shards of a model: each is added up where it varies.
    sums: dict[tuple[Any, ...], Array] = {}
    for x in jax.tree.leaves(updates):
      axes = tuple(sorted(core.varying_axes(x), key=str))
      sums[axes] = sums.get(axes, jnp.float32(0)) + _square_sum(x)
    total = jnp.float32(0)
    for axes, own in sums.items():
      total = total + (lax.psum(own, axes) if axes else own)
    norm = jnp.sqrt(total)

    def clip_leaf(x: Array) -> Array:
      clipped = (x / norm.astype(x.dtype)) * max_norm
      return jnp.where(norm < max_norm, x, clipped)

    return jax.tree.map(clip_leaf, updates), state

  return optax.GradientTransformation(lambda _: optax.EmptyState(), update_fn)


def _square_sum(x: Array) -> Array:
  wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
  return jnp.sum(jnp.square(wide))
