"""Model state of a data-parallel step, such as batch statistics."""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from jaxmotion import core, program
from jaxmotion.core import Array, AxisName, PyTree
from jaxmotion.transforms import _states


def is_floating(a: Array) -> bool:
  """Returns whether an array holds floating-point elements."""
  return jnp.issubdtype(a.dtype, jnp.floating)


def check_floating(state: PyTree) -> None:
  """Raises unless all leaves have a mean, by which unequal work joins them."""
  for path, leaf in core.named_leaves(state):
    core.check_float(f"model_state/{path}", leaf)


def check_same_shapes(new: PyTree, old: PyTree) -> PyTree:
  """Returns the arrays of a new model state; raises unless it fits the old."""
  message = (
    "`loss_fn` must return a model state of the structure, shapes and dtypes "
    "that it was given, "
  )
  if not core.same_structure(new, old):
    raise ValueError(
      f"{message}{jax.tree.structure(old)}, got {jax.tree.structure(new)}."
    )
  new = jax.tree.map(jnp.asarray, new)
  for (path, a), b in zip(
    core.named_leaves(new), jax.tree.leaves(old), strict=True
  ):
    if (a.shape, a.dtype) != (b.shape, b.dtype):
      place = f" at {path!r}" if path else ""
      raise ValueError(
        f"{message}{core.shape_string(b)}, got {core.shape_string(a)}{place}."
      )
  return new


def check_equal(
  compute_state: Callable[[PyTree, PyTree], PyTree],
  replicated: PyTree,
  own: PyTree,
  axis_name: AxisName,
) -> None:
  """Raises unless all leaves that have no mean are equal on all workers."""
  # They are equal if they are computed without the worker's own arguments.
  if all(map(is_floating, jax.tree.leaves(replicated))):
    return
  jaxpr, shapes = jax.make_jaxpr(compute_state, return_shape=True)(
    replicated, own
  )
  axes = frozenset(core.axis_names(axis_name))
  varying = [frozenset()] * len(jax.tree.leaves(replicated)) + [axes] * len(
    jax.tree.leaves(own)
  )
  differs = program.find_varying(jaxpr, varying, axes)
  for (path, like), over in zip(
    core.named_leaves(shapes), differs, strict=True
  ):
    if over and not is_floating(like):
      raise ValueError(
        f"`model_state{'/' * bool(path)}{path}` must not depend on the batch "
        f"or the key, because {core.shape_string(like)} has no mean over "
        "workers. "
        "Make it floating-point, or keep each worker's own: "
        "model_state='local'."
      )


def keep_finite(new: Array, old: Array) -> Array:
  """Returns the new array, or the old one if the new one is not finite."""
  if not is_floating(new):
    return new
  return jnp.where(jnp.isfinite(new).all(), new, old)


def keep_if_skipped(
  new: PyTree, old: PyTree, old_opt_state: PyTree, opt_state: PyTree
) -> PyTree:
  """Returns the old floating-point model state if the update was skipped."""
  # What made a gradient not finite made statistics so too. A delayed gradient
  # is skipped one step later, so its statistics are looked at themselves.
  if _states.is_delayed(opt_state):
    return jax.tree.map(keep_finite, new, old)
  before = _states.list_skipped(old_opt_state)
  after = _states.list_skipped(opt_state)
  if not after:
    return new
  skipped = jnp.stack(after).sum() > jnp.stack(before).sum()
  return jax.tree.map(
    lambda a, b: jnp.where(skipped, b, a) if is_floating(a) else a, new, old
  )
