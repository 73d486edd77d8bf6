"""Checks of transforms that exchange gradients or run on parts of them."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, PartitionSpec as P

from jaxmotion import core, transforms
from jaxmotion.core import AxisName, PyTree
from jaxmotion.testing._laws import check_array, require
from jaxmotion.transforms.extend import check_mesh

# The mean of equal gradients and an update in parts round differently.
_TOLERANCE = 1e-4


def _check_params(name: str, value: PyTree) -> PyTree:
  """Returns a tree of floating-point arrays with values, or raises."""
  for path, x in core.named_leaves(value):
    check_array(f"{name}[{path!r}]" if path else name, x)
  return value


_ARGS: dict[str, core.Kind] = {
  "tx": core.instance(optax.GradientTransformation, "an optax transformation"),
  "params": _check_params,
  "steps": core.integer(1, 1000),
}


@core.declare(**_ARGS)
def check_transform(
  tx: optax.GradientTransformation,
  mesh: Mesh,
  params: PyTree,
  *,
  axis_name: AxisName = "data",
  steps: int = 3,
  **extra_args: Any,
) -> None:
  """Checks the properties of a transformation that exchanges gradients.

  It runs in a real training step on the mesh with `check_vma`. The step
  compiles once. The parameters have the same bits on every worker and stay
  finite. The state keeps its structure, shapes and dtypes, and holds no array
  twice, so that a step may donate it. A second run gives the same bits.

  Args:
    tx: an optax chain with an exchange over `axis_name`.
    mesh: device mesh that has the axis.
    params: pytree of floating-point parameters.
    axis_name: the workers' axis, or a tuple of axes.
    steps: number of training steps to run.
    **extra_args: passed to the chain's `update`.

  Raises:
    AssertionError: a property does not hold; the message says which.

  Example:
    >>> from jaxmotion import transforms
    >>> mesh = Mesh(jax.devices()[:1], ("data",))
    >>> tx = optax.chain(transforms.exchange("data"), optax.sgd(0.1))
    >>> check_transform(tx, mesh, {"w": jnp.ones(8)})
  """
  traces: list[None] = []

  def loss_fn(params: PyTree, batch: jax.Array) -> jax.Array:
    """Returns squared distances to each target; counts its traces."""
    traces.append(None)
    leaves = jax.tree.leaves(params)
    return sum(
      (
        jnp.sum((p.astype(jnp.float32) - t) ** 2) for p in leaves for t in batch
      ),
      jnp.float32(0),
    )

  init, step = transforms.make_train_step(
    loss_fn, tx, mesh, axis_name=axis_name
  )
  if not jax.tree.leaves(params):
    raise ValueError(
      f"`params` must be a tree of floating-point arrays, got {params!r}."
    )
  _check_own_arrays(tx, mesh, params)
  workers = core.count_devices(axis_name, mesh.shape)
  batch = jnp.linspace(-1.0, 1.0, 2 * workers)

  def train() -> tuple[PyTree, PyTree, PyTree]:
    state = init(params)
    first = jax.tree.map(core.shape_dtype, state.opt_state)
    for _ in range(steps):
      state, _ = step(state, batch, **extra_args)
    return state.params, first, state.opt_state

  p, first, state = train()
  again, _, _ = train()
  require(len(traces) == 1, f"traced {len(traces)} times in {2 * steps} steps")
  last = jax.tree.map(core.shape_dtype, state)
  require(first == last, f"the state changed from {first} to {last}")
  for a, b in zip(jax.tree.leaves(p), jax.tree.leaves(again), strict=True):
    require(bool(jnp.isfinite(a).all()), "a parameter is not finite")
    require(_bytes_of(a) == _bytes_of(b), "two equal runs differ")
    require(a.sharding.spec == P(), "a parameter is not replicated")
    copies = {_bytes_of(s.data) for s in a.addressable_shards}
    require(len(copies) == 1, "workers hold different parameters")


def _check_own_arrays(
  tx: optax.GradientTransformation, mesh: Mesh, params: PyTree
) -> None:
  """Requires that no two leaves of the first state are one array."""

  def init(params: PyTree) -> None:
    leaves = jax.tree.leaves(tx.init(params))
    require(
      len({id(a) for a in leaves}) == len(leaves),
      "the state holds one array twice",
    )

  # Tracers tell: in a compiled `init` every result has its own buffer.
  jax.eval_shape(
    jax.shard_map(init, mesh=mesh, in_specs=P(), out_specs=P()), params
  )


def _bytes_of(a: Any) -> bytes:
  return np.asarray(a).tobytes()


@core.declare(**_ARGS)
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
  names = check_mesh(mesh, axis_name)
  workers = core.count_devices(names, mesh.shape)
  if workers < 2:
    raise ValueError(
      f"`mesh` must have at least 2 workers along {names!r}, got {workers}."
    )
  alone = optax.with_extra_args_support(tx)
  parts = transforms.sharded(axis_name, tx)

  def compare(params: PyTree) -> PyTree:
    """Returns the error of each update in parts, stacked over steps."""
    ours, state, p = parts.init(params), alone.init(params), params
    errors = []
    for step in range(steps):
      grads = _draw_gradients(params, step)
      expected, state = alone.update(grads, state, p)
      updates, ours = parts.update(core.to_varying(grads, names), ours, p)
      errors.append(jax.tree.map(_difference, updates, expected))
      p = optax.apply_updates(p, expected)
    return jax.tree.map(lambda *each: jnp.stack(each), *errors)

  program = jax.shard_map(compare, mesh=mesh, in_specs=P(), out_specs=P())
  for path, errors in core.named_leaves(jax.jit(program)(params)):
    for step, error in enumerate(np.asarray(errors)):
      if not error <= _TOLERANCE:
        raise AssertionError(
          f"`{path}`: the update of step {step} in parts differs from that of "
          f"the whole leaf by {error:.2g} of its greatest element"
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
