"""Check that an optimizer may be run on parts of the parameters."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, PartitionSpec as P

from jaxmotion import core, transforms
from jaxmotion.core import AxisName, PyTree
from jaxmotion.testing import _arguments
from jaxmotion.transforms.extend import check_mesh

_MAX_STEPS = 1000
# The mean of equal gradients and an update in parts round differently.
_TOLERANCE = 1e-4


def check_sharded(
  tx: optax.GradientTransformation,
  mesh: Mesh,
  params: PyTree,
  *,
  axis_name: AxisName = "data",
  steps: int = 3,
) -> None:
  """Checks that an optimizer in `sharded` makes the updates that it made alone.

  All workers get the same gradients, of very different sizes. After each step
  the updates of the parts, joined, must be those of the whole leaves. What
  looks across elements (norms, factored moments) fails, and so does noise that
  is drawn for a leaf.

  Args:
    tx: the transformation that `sharded` is given.
    mesh: device mesh that has the axis, with at least 2 workers.
    params: pytree of floating-point parameters; leaves of fewer than 64
      elements per worker are not cut, so they show nothing.
    axis_name: the workers' axis, or a tuple of axes.
    steps: number of updates to compare.

  Raises:
    AssertionError: an update differs; the message says of which leaf.
    ValueError: the mesh has one worker only, or `sharded` refuses `tx`.

  Example:
    >>> if jax.device_count() > 1:
    ...   mesh = Mesh(jax.devices()[:2], ("data",))
    ...   check_sharded(optax.adamw(1e-3), mesh, {"w": jnp.ones((16, 8))})
  """
  core.check_instance(
    "tx", tx, optax.GradientTransformation, "an optax transformation"
  )
  names = check_mesh(mesh, axis_name)
  core.check_int("steps", steps, 1, _MAX_STEPS)
  _check_workers(mesh, names)
  core.check_arrays("params", params)
  for path, x in core.named_leaves(params):
    _arguments.check_array(f"params[{path!r}]" if path else "params", x)
  alone = optax.with_extra_args_support(tx)
  parts = transforms.sharded(axis_name, tx)

  def compare(params: PyTree) -> PyTree:
    ours, state, p = parts.init(params), alone.init(params), params
    found = []
    for step in range(steps):
      grads = _draw_gradients(params, step)
      expected, state = alone.update(grads, state, p)
      updates, ours = parts.update(core.to_varying(grads, names), ours, p)
      found.append(jax.tree.map(_difference, updates, expected))
      p = optax.apply_updates(p, expected)
    return jax.tree.map(lambda *each: jnp.stack(each), *found)

  program = jax.shard_map(compare, mesh=mesh, in_specs=P(), out_specs=P())
  for path, errors in core.named_leaves(jax.jit(program)(params)):
    for step, error in enumerate(np.asarray(errors)):
      if not error <= _TOLERANCE:
        raise AssertionError(
          f"`{path}`: the update of step {step} in parts differs from that of "
          f"the whole leaf by {error:.2g} of its greatest element"
        )


def _check_workers(mesh: Mesh, axis_name: AxisName) -> None:
  workers = math.prod(mesh.shape[name] for name in core.axis_names(axis_name))
  if workers < 2:
    raise ValueError(
      f"`mesh` must have at least 2 workers along {axis_name!r}, got {workers}."
    )


def _draw_gradients(params: PyTree, step: int) -> PyTree:
  """Returns gradients whose elements differ in size by orders of magnitude."""
  generator = np.random.default_rng(step)

  def draw_leaf(x: Any) -> Any:
    size = np.exp(2 * generator.normal(size=x.shape))
    return jnp.asarray(size * generator.normal(size=x.shape), x.dtype)

  return jax.tree.map(draw_leaf, params)


def _difference(update: Any, expected: Any) -> Any:
  """Returns the greatest difference relative to the greatest element."""
  if not expected.size:
    return jnp.float32(0)
  wide = expected.astype(jnp.float32)
  error = jnp.max(jnp.abs(update.astype(jnp.float32) - wide))
  return error / jnp.maximum(jnp.max(jnp.abs(wide)), jnp.float32(1e-30))
