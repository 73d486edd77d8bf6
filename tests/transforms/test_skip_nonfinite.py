import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh

import jaxmotion
from jaxmotion import codecs, wire
from tests.transforms.helpers import bits

WORKERS = 4
MESH = Mesh(np.array(jax.devices()[:WORKERS]), ("data",))
PARAMS = {"w": jnp.linspace(-1, 1, 40)}
CODEC = codecs.feedback(codecs.uniform(bits=4))


def loss_fn(params, batch):
  return jnp.sum(params["w"] * batch[0])


def steps(tx, batches):
  init, step = jaxmotion.make_train_step(loss_fn, tx, MESH)
  state = init(PARAMS)
  for batch in batches:
    state, _ = step(state, batch)
  return state.params, state.opt_state


GOOD = jnp.asarray(
  np.random.default_rng(0).normal(size=(WORKERS, 40)).astype(np.float32)
)


def test_one_workers_nonfinite_gradient_leaves_the_whole_state_as_it_was():
  bad = GOOD.at[2, 3].set(jnp.inf)
  chain = optax.chain(jaxmotion.exchange("data", CODEC), optax.adam(1e-2))
  tx = jaxmotion.skip_nonfinite(chain, "data")
  p1, s1 = steps(tx, [GOOD, GOOD])
  p2, s2 = steps(tx, [GOOD, bad, GOOD])
  assert int(s1.skipped) == 0 and int(s2.skipped) == 1
  assert bits(p1) == bits(p2)
  assert bits(s1.inner) == bits(s2.inner)


@pytest.mark.parametrize("policy", ["skip", "zero", "propagate"])
def test_no_policy_lets_a_nonfinite_element_into_the_error_memory(policy):
  bad = GOOD.at[2, 3].set(jnp.nan)
  tx = optax.chain(
    jaxmotion.exchange("data", CODEC, nonfinite=policy), optax.sgd(1e-2)
  )
  params, state = steps(tx, [GOOD, bad, GOOD])
  for error in jax.tree.leaves(state[0].codec_state):
    assert np.isfinite(np.asarray(error)).all()
  assert bool(jnp.isfinite(params["w"]).all()) == (policy != "propagate")
  assert int(state[0].skipped) == (policy == "skip")


def test_skipping_the_exchange_keeps_its_memory_bit_for_bit():
  bad = GOOD.at[2, 3].set(jnp.nan)
  tx = optax.chain(
    jaxmotion.exchange("data", CODEC, nonfinite="skip"), optax.sgd(1e-2)
  )
  _, before = steps(tx, [GOOD])
  _, after = steps(tx, [GOOD, bad])
  assert bits(before[0].codec_state) == bits(after[0].codec_state)


def weighted_steps(tx, weights):
  """Steps with all gradients finite, and these weights of the workers."""

  def step(grads, state, weight):
    updates, state = tx.update({"w": grads[0]}, state, weight=weight[0])
    return updates["w"], state

  def init(grads):
    return tx.init({"w": grads[0]})

  split = jax.P("data")
  shapes = []

  def note(grads):
    shapes.append(jax.tree.map(jax.typeof, init(grads)))
    return jnp.zeros(())

  on = dict(mesh=MESH)
  jax.eval_shape(
    jax.shard_map(note, in_specs=split, out_specs=jax.P(), **on), GOOD
  )
  specs = jaxmotion.state_specs(shapes[0], "data")
  state = jax.jit(jax.shard_map(init, in_specs=split, out_specs=specs, **on))(
    GOOD
  )
  program = jax.jit(
    jax.shard_map(
      step,
      in_specs=(split, specs, split),
      out_specs=(jax.P(), specs),
      **on,
    )
  )
  results = []
  for weight in weights:
    updates, state = program(GOOD, state, np.array(weight, np.float32))
    results.append((np.asarray(updates), state))
  return results


def test_two_guards_agree_by_one_sum_once_compiled():
  chain = jaxmotion.exchange("data", CODEC, nonfinite="skip")
  tx = jaxmotion.skip_nonfinite(optax.chain(chain, optax.sgd(1e-2)), "data")
  init, step = jaxmotion.make_train_step(loss_fn, tx, MESH)
  args = (init(PARAMS), GOOD)
  traced = wire.step_bytes(step, *args).select(dtype="int32")
  compiled = wire.compiled_bytes(step.lower(*args).compile())
  assert [(m.payload_bytes, m.count) for m in traced.moves] == [(4, 2)]
  merged = compiled.select(dtype="int32").moves
  assert [(m.payload_bytes, m.count) for m in merged] == [(4, 1)]


@pytest.mark.parametrize("policy", ["propagate", "skip", "zero", "wrapped"])
def test_a_weight_that_is_not_finite_follows_the_policy(policy):
  if policy == "wrapped":
    tx = jaxmotion.skip_nonfinite(jaxmotion.exchange("data", CODEC), "data")
  else:
    tx = jaxmotion.exchange("data", CODEC, nonfinite=policy)
  even, bad, without = [1, 1, 1, 1], [1, np.nan, 1, 1], [1, 0, 1, 1]
  (_, before), (updates, after), last = weighted_steps(tx, [even, bad, even])
  for error in jax.tree.leaves(last):
    assert np.isfinite(np.asarray(error, np.float64)).all()
  if policy == "propagate":
    assert np.isnan(updates).all()
  elif policy == "zero":
    _, (expected, _) = weighted_steps(tx, [even, without])
    np.testing.assert_array_equal(updates, expected)
    assert np.abs(updates).max() > 0
  else:
    np.testing.assert_array_equal(updates, 0)
    assert int(after.skipped) == 1
    kept = before.inner if policy == "wrapped" else before.codec_state
    same = after.inner if policy == "wrapped" else after.codec_state
    assert bits(kept) == bits(same)
