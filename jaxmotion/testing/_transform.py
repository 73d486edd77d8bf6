"""Checks of the properties of a transform that exchanges gradients."""

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

_MAX_STEPS = 1000


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
    traces.append(None)
    leaves = jax.tree.leaves(params)
    return sum(
      (
        jnp.sum((p.astype(jnp.float32) - t) ** 2) for p in leaves for t in batch
      ),
      jnp.float32(0),
    )

  core.check_instance(
    "tx", tx, optax.GradientTransformation, "an optax transformation"
  )
  core.check_int("steps", steps, 1, _MAX_STEPS)
  init, step = transforms.make_train_step(
    loss_fn, tx, mesh, axis_name=axis_name
  )
  _check_params(params)
  _check_own_arrays(tx, mesh, params)
  workers = math.prod(mesh.shape[a] for a in core.axis_names(axis_name))
  batch = jnp.linspace(-1.0, 1.0, 2 * workers)

  def train() -> tuple[PyTree, PyTree, PyTree]:
    state = init(params)
    first = jax.tree.map(
      lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), state.opt_state
    )
    for _ in range(steps):
      state, _ = step(state, batch, **extra_args)
    return state.params, first, state.opt_state

  p, first, state = train()
  again, _, _ = train()
  _require(len(traces) == 1, f"traced {len(traces)} times in {2 * steps} steps")
  last = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), state)
  _require(first == last, f"the state changed from {first} to {last}")
  for a, b in zip(jax.tree.leaves(p), jax.tree.leaves(again), strict=True):
    _require(bool(jnp.isfinite(a).all()), "a parameter is not finite")
    _require(_bytes_of(a) == _bytes_of(b), "two equal runs differ")
    _require(a.sharding.spec == P(), "a parameter is not replicated")
    copies = {_bytes_of(s.data) for s in a.addressable_shards}
    _require(len(copies) == 1, "workers hold different parameters")


def _check_params(params: Any) -> None:
  leaves = core.named_leaves(params)
  if not leaves:
    raise ValueError(
      f"`params` must be a tree of floating-point arrays, got {params!r}."
    )
  for path, x in leaves:
    _arguments.check_array(f"params[{path!r}]" if path else "params", x)


def _check_own_arrays(
  tx: optax.GradientTransformation, mesh: Mesh, params: PyTree
) -> None:
  """Requires that no two leaves of the first state are one array."""

  def init(params: PyTree) -> None:
    leaves = jax.tree.leaves(tx.init(params))
    _require(
      len({id(a) for a in leaves}) == len(leaves),
      "the state holds one array twice",
    )

  # Tracers tell: in a compiled `init` every result has its own buffer.
  jax.eval_shape(
    jax.shard_map(init, mesh=mesh, in_specs=P(), out_specs=P()), params
  )


def _bytes_of(a: Any) -> bytes:
  return np.asarray(a).tobytes()


def _require(holds: bool, message: str) -> None:
  if not holds:
    raise AssertionError(message)
