"""Updates of one worker's own arrays, with their leading axis."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxmotion.program import parse_hlo
from jaxmotion.transforms._schemes._local_updates import update_stacked

PARAMS = {"w": np.linspace(-1, 2, 96, dtype=np.float32).reshape(12, 8)}
TX = optax.adamw(0.1)


def stack(tree):
  return jax.tree.map(lambda a: jnp.asarray(a)[None], tree)


def update(grads, params, state):
  updates, state = TX.update(grads, state, params)
  return optax.apply_updates(params, updates), state


def branch(grads, params):
  total = jax.lax.cond(
    grads["w"].sum() > 0, lambda p: 2 * p["w"], lambda p: p["w"] - 1, params
  )
  return ({"w": total},)


@pytest.mark.parametrize("run", [update, branch], ids=["straight", "branch"])
def test_results_are_those_of_a_worker_by_itself(run):
  args = (PARAMS, PARAMS, TX.init(PARAMS))
  args = args if run is update else args[:2]
  expected = run(*args)
  found = update_stacked(run, *map(stack, args))
  for a, b in zip(*map(jax.tree.leaves, (found, expected)), strict=True):
    np.testing.assert_allclose(a, np.asarray(b)[None], rtol=1e-6)


def test_a_branch_runs_one_side():
  jaxpr = jax.make_jaxpr(lambda *args: update_stacked(branch, *args))(
    *map(stack, (PARAMS, PARAMS))
  )
  assert "cond[" in str(jaxpr)


def test_moments_are_updated_in_their_buffers():
  args = map(stack, (PARAMS, PARAMS, TX.init(PARAMS)))

  def step(grads, params, state):
    # The gradient is a product, as of a layer: one worker's own, without axis.
    grads = stack({"w": grads["w"][0] @ jnp.eye(8)})
    return update_stacked(update, grads, params, state)

  compiled = jax.jit(step, donate_argnums=(1, 2)).lower(*args).compile()
  module = parse_hlo(compiled.as_text())
  copied = [
    i.name
    for i in module.computations[module.entry].values()
    if i.opcode == "copy" and i.type.startswith("f32[1,12,8]")
  ]
  assert not copied
