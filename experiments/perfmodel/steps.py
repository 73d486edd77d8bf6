"""Compiled training steps of the cases, on all devices of a mesh."""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import optax

import jaxmotion
from experiments.hosts import jax_worker
from experiments.perfmodel import cases
from jaxmotion import transforms

_LEARNING_RATE = 0.01


def compile_step(
  mesh: jax.sharding.Mesh, case: cases.Case
) -> Callable[[], None]:
  """Compiles a step and returns a function that runs it once."""
  make = _separate_step if case.exchange == "none" else _exchange_step
  step, state = make(mesh, case)
  batch = _make_batch(mesh, case)
  compiled = step.lower(state, batch).compile()
  kept = [state]

  def run() -> None:
    state, loss = compiled(kept[0], batch)
    kept[0] = jax.block_until_ready(state)
    jax.block_until_ready(loss)

  return run


def _separate_step(
  mesh: jax.sharding.Mesh, case: cases.Case
) -> tuple[Any, Any]:
  """Returns a step whose workers exchange nothing, and its parameters."""
  tx = optax.sgd(_LEARNING_RATE)

  def local(params: Any, batch: Any) -> tuple[Any, Any]:
    params = jax.tree.map(lambda a: a[0], params)
    grad = transforms.local_value_and_grad(jax_worker.loss_fn, "axis")
    loss, grads = grad(params, batch)
    updates, _ = tx.update(grads, tx.init(params), params)
    new = optax.apply_updates(params, updates)
    return jax.tree.map(lambda a: a[None], new), loss[None]

  step = jax.shard_map(
    local, mesh=mesh, in_specs=jax.P("axis"), out_specs=jax.P("axis")
  )
  params = jax.tree.map(
    lambda a: _shard_array(mesh, np.stack([a] * mesh.size)),
    jax_worker.make_params(case.widths),
  )
  return jax.jit(step, donate_argnums=0), params


def _exchange_step(
  mesh: jax.sharding.Mesh, case: cases.Case
) -> tuple[Any, Any]:
  """Returns a step that exchanges gradients, and its state."""
  tx = optax.chain(
    jaxmotion.exchange("axis", case.codec), optax.sgd(_LEARNING_RATE)
  )
  init, step = jaxmotion.make_train_step(
    jax_worker.loss_fn, tx, mesh, axis_name="axis", mean_loss=False
  )
  return step, init(jax_worker.make_params(case.widths))


def _make_batch(mesh: jax.sharding.Mesh, case: cases.Case) -> Any:
  rng = np.random.default_rng(0)
  rows, widths = mesh.size * case.batch, case.widths
  return {
    "x": _shard_array(mesh, rng.standard_normal((rows, widths[0]), np.float32)),
    "y": _shard_array(mesh, rng.integers(0, widths[-1], rows).astype(np.int32)),
  }


def _shard_array(mesh: jax.sharding.Mesh, x: np.ndarray) -> jax.Array:
  sharding = jax.sharding.NamedSharding(mesh, jax.P("axis"))
  return jax.make_array_from_callback(x.shape, sharding, lambda i: x[i].copy())
