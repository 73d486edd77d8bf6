"""Sharded optimizers beside tensor parallelism, on a data x model mesh."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, PartitionSpec as P

import jaxmotion
from jaxmotion import codecs, transforms, wire
from jaxmotion.memory import compress_state
from jaxmotion.transforms import _init_state
from tests.transforms.test_model_axes import (
  BATCH,
  PARAMS,
  SPECS,
  check_placed,
  check_trained,
  explicit_loss,
  list_collectives,
  loss_fn,
  make_mesh,
  place,
  plain_step,
)

# Of 2 workers; the model's axis cuts the other dimension.
CUTS = {"b": P(), "w1": P("data", "model"), "w2": P("model", "data")}
ADAM = optax.adam(0.05)


def make_tx(**options):
  options = {"weight_codec": codecs.identity()} | options
  return jaxmotion.sharded("data", ADAM, **options)


def check_state(state, mesh):
  mu = optax.tree.get(state, "mu")
  trees = [mu, state.master.value] if state.master.value else [mu]
  for tree in trees:
    assert jax.tree.map(np.shape, tree) == jax.tree.map(np.shape, PARAMS)
    check_placed(tree, mesh, CUTS)


def test_identity_is_the_plain_step_of_jit():
  mesh, tx = make_mesh(), make_tx(weight_codec=None)
  init, step = jaxmotion.make_train_step(loss_fn, tx, mesh, specs=SPECS)
  state = init(place(PARAMS, mesh))
  check_state(state.opt_state, mesh)
  compiled = step.lower(state, BATCH).compile()
  for _ in range(2):
    state, loss = step(state, BATCH)
  check_trained(state.params, loss, mesh)
  check_state(state.opt_state, mesh)
  plain = plain_step()[2]
  assert list_collectives(compiled, "model") == list_collectives(plain, "model")


def draw_gradients(steps):
  """Of every example, far from equal: its gradient is itself."""
  rng = np.random.default_rng(1)
  return [
    {k: rng.normal(size=(4, *a.shape)).astype("f") for k, a in PARAMS.items()}
    for _ in range(steps)
  ]


def linear_loss(params, batch):
  return sum(jnp.sum(params[k] * jnp.mean(batch[k], 0)) for k in params)


@functools.cache
def train_coded():
  """(state, compiled step, traced bytes, skipped state) through 4 bits."""
  codec = codecs.uniform(bits=4, block=32, rounding="stochastic")
  tx = jaxmotion.sharded(
    "data",
    optax.sgd(1.0),
    gradient_codec=codecs.feedback(codec),
    weight_codec=codec,
    nonfinite="skip",
  )
  mesh, grads = make_mesh(), draw_gradients(3)
  init, step = jaxmotion.make_train_step(
    linear_loss, tx, mesh, specs=SPECS, donate=False
  )
  state = init(place(PARAMS, mesh))
  traced = wire.step_bytes(step, state, grads[0])
  compiled = step.lower(state, grads[0]).compile()
  for batch in grads:
    state, _ = step(state, batch)
  # One element of one shard on one worker is not finite.
  bad = grads[0] | {"w1": grads[0]["w1"].copy()}
  bad["w1"][0, 0, 0] = np.nan
  return state, compiled, traced, step(state, bad)[0]


def test_codecs_conserve_what_came_in():
  state = train_coded()[0].opt_state
  exact = {
    k: sum(g[k].astype(np.float64).mean(0) for g in draw_gradients(3))
    for k in PARAMS
  }
  rows, ((whole, _),) = state.codec_state.value
  codec = codecs.feedback(codecs.uniform(bits=4, block=32))
  # Rows of devices, data major: the mean over workers, of each model's shard.
  error = {"b": jax.vmap(codec.error)(whole)[::2].mean(0)}
  for name, axis, memory in zip(("w1", "w2"), (0, 1), rows, strict=True):
    own = np.asarray(jax.vmap(jax.vmap(codec.error))(memory), np.float64)
    shards = own.reshape(2, 2, *own.shape[1:]).mean(0)  # (model, part, ...)
    error[name] = np.concatenate(
      [np.concatenate(list(shard), axis) for shard in shards], 1 - axis
    )
  for name in PARAMS:
    sent = PARAMS[name] - np.asarray(state.master.value[name], np.float64)
    np.testing.assert_allclose(sent + error[name], exact[name], atol=1e-5)
    assert np.abs(error[name]).max() > 1e-3


def test_a_device_sends_its_own_part_and_nothing_else():
  _, compiled, traced, _ = train_coded()
  # Each of two workers sends one part of two, and then its own part.
  parts = {"w1": jnp.zeros((4, 16)), "w2": jnp.zeros((16, 4))}
  codec = codecs.uniform(bits=4, block=32)
  expected = sum(2 * wire.payload_bytes(codec, part) for part in parts.values())
  expected += wire.payload_bytes(codec, jnp.zeros(8)) + 4  # b, and the loss.
  agreement = 6  # All four devices agree, by a sum, that all is finite.
  assert traced.total_bytes == expected + agreement
  own = 2 * 4  # The loss adds up the shards of w1, and those of w2.
  assert wire.compiled_bytes(compiled).total_bytes == traced.total_bytes + own


def test_devices_of_a_worker_agree_on_what_they_share():
  (params, _, state), _, _, (skipped, _, after) = train_coded()
  first, *others = [np.asarray(s.data) for s in params["b"].addressable_shards]
  for other in others:
    np.testing.assert_array_equal(first, other)
  assert int(after.skipped) == 1
  jax.tree.map(np.testing.assert_array_equal, skipped, params)
  jax.tree.map(
    np.testing.assert_array_equal,
    (after.master, after.inner, after.codec_state),
    (state.master, state.inner, state.codec_state),
  )


@pytest.mark.parametrize("bound", [False, True])
def test_types_of_explicit_axes_tell_what_is_sharded(bound):
  mesh, tx = make_mesh(AxisType.Explicit), make_tx()
  params = place(PARAMS, mesh)
  if bound:  # A step of one's own, whose state is made beside it.
    tx = transforms.bind_mesh(tx, mesh, specs=SPECS)

    @transforms.parallelize_step(mesh)
    def step(params, state, batch):
      loss, grads = jax.value_and_grad(explicit_loss)(params, batch)
      updates, state = tx.update(grads, state, params)
      return optax.apply_updates(params, updates), state, loss

    state = params, tx.init(params)
  else:
    init, train = jaxmotion.make_train_step(
      explicit_loss, tx, mesh, specs=SPECS
    )
    state = init(params)
  check_state(state[-1], mesh)
  with jax.set_mesh(mesh):
    for _ in range(2):
      if bound:
        *state, loss = step(*state, BATCH)
      else:
        state, loss = train(state, BATCH)
  check_trained(state[0], loss, mesh)
  check_state(state[-1], mesh)


def trace_update(tx, specs=SPECS, params=PARAMS, axis_names=("data",)):
  """Traces a state and an update of two workers; nothing is compiled."""

  def update(params):
    varying = tuple(sorted(set(axis_names) - {"model"}))
    grads = jax.tree.map(
      lambda a: jax.lax.pcast(a, varying, to="varying"), params
    )
    state = _init_state.shard_states(tx.init(params), params, specs)
    return tx.update(grads, state, params)[0]

  full = "model" in axis_names
  own = SPECS if specs is None else specs
  mapped = jax.shard_map(
    update,
    mesh=make_mesh(),
    in_specs=(own if full else P(),),
    out_specs=own if full else P(),
    axis_names=set(axis_names),
  )
  return jax.eval_shape(mapped, jax.tree.map(jnp.asarray, params))


def test_a_map_over_all_axes_wants_specs_too():
  both = ("data", "model")
  assert trace_update(make_tx(), axis_names=both)["w1"].shape == (8, 32)
  with pytest.raises(ValueError, match="`specs` must say .*'model'.* `w1`"):
    trace_update(make_tx(), None, axis_names=both)


def test_updates_that_look_across_a_shard_of_the_model_are_refused():
  # Workers do not cut the only dimension, which the model's axis shards.
  params, specs = {"b": np.zeros(256, np.float32)}, {"b": P("model")}
  for inner in (optax.lamb(1e-3), optax.clip_by_global_norm(1.0)):
    tx = jaxmotion.sharded("data", inner)
    with pytest.raises(ValueError, match="`tx` must treat every element"):
      trace_update(tx, specs, params)
  trace_update(jaxmotion.sharded("data", ADAM), specs, params)


def test_encoded_moments_are_each_devices_own():
  inner = compress_state(ADAM, min_leaf_size=64)
  tx = jaxmotion.sharded("data", inner)
  state = jax.eval_shape(
    lambda: transforms.init_state(tx, PARAMS, make_mesh(), specs=SPECS)
  )
  leaves = jax.tree.leaves(state.inner.value)
  specs = jax.tree.leaves(state.inner.specs().value)
  encoded = [
    spec
    for a, spec in zip(leaves, specs, strict=True)
    if a.shape and a.shape not in {x.shape for x in PARAMS.values()}
  ]
  assert encoded
  for spec in encoded:
    assert {n for e in spec for n in (e or ())} == {"data", "model"}, spec
  trace_update(tx)


def test_the_clip_takes_the_norm_over_workers_and_the_model():
  clip = transforms.clip_by_global_norm(0.5, "data")
  tx = jaxmotion.sharded("data", optax.chain(clip, optax.sgd(1.0)))
  (grads,) = draw_gradients(1)
  init, step = jaxmotion.make_train_step(
    linear_loss, tx, make_mesh(), specs=SPECS
  )
  state, _ = step(init(PARAMS), grads)
  means = {k: g.mean(0) for k, g in grads.items()}
  norm = np.sqrt(sum(np.sum(g**2) for g in means.values()))
  for name, mean in means.items():
    np.testing.assert_allclose(
      state.params[name], PARAMS[name] - 0.5 * mean / norm, atol=1e-6
    )
