"""Sharded parameters that the (emulated) workers do not divide."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.sharding import AxisType, PartitionSpec as P

import jaxmotion
from jaxmotion import codecs
from jaxmotion.transforms import gather_block, gather_params
from tests.meshes import mesh_of
from tests.transforms.helpers import assert_close, bits

LAYERS, WIDTH, HIDDEN = 3, 31, 127
RNG = np.random.default_rng(0)
PARAMS = {
  "embed": np.float32(RNG.normal(size=(7, WIDTH)) / 3),  # Whole on 4 workers.
  "layers": {
    "up": np.float32(RNG.normal(size=(LAYERS, WIDTH, HIDDEN)) / 6),
    "down": np.float32(RNG.normal(size=(LAYERS, HIDDEN, WIDTH)) / 12),
    "bias": np.zeros((LAYERS, HIDDEN), np.float32),
  },
}
INT8 = codecs.uniform(bits=8)
INT4 = codecs.uniform(bits=4, block=128)
ADAMW = optax.adamw(1e-2)
CODED = dict(weight_codec=INT8, gradient_codec=INT4, error_feedback=True)


def batch_at(step, size=24):
  x = np.random.default_rng(step).normal(size=(size, 7)).astype(np.float32)
  return x, np.sin(x.sum(1, keepdims=True))


def use_layer(own, x):
  return x + jnp.tanh(x @ own["up"] + own["bias"][None]) @ own["down"]


def loss_of(block, gather):
  def loss_fn(params, batch):
    x = batch[0] @ gather(params["embed"])
    x, _ = lax.scan(lambda x, own: (block(own, x), None), x, params["layers"])
    return jnp.mean((jnp.mean(x, 1, keepdims=True) - batch[1]) ** 2)

  return loss_fn


WHOLE = loss_of(use_layer, lambda w: w)
LOSS = loss_of(gather_block(use_layer), gather_params)


def make(mesh, tx=ADAMW, axis_name="data", specs=None, **options):
  scheme = jaxmotion.fully_sharded(tx, stacked="layers/", **options)
  return jaxmotion.make_train_step(
    LOSS, scheme, mesh, axis_name=axis_name, specs=specs, donate=False
  )


@functools.cache
def train_alone():
  """Parameters and losses of 3 steps of whole parameters."""

  @jax.jit
  def step(params, state, batch):
    loss, grads = jax.value_and_grad(WHOLE)(params, batch)
    updates, state = ADAMW.update(grads, state, params)
    return optax.apply_updates(params, updates), state, loss

  params, state, losses = PARAMS, jax.jit(ADAMW.init)(PARAMS), []
  for i in range(3):
    params, state, loss = step(params, state, batch_at(i))
    losses.append(float(loss))
  return params, losses


@functools.cache
def train(**options):
  """State and losses of 3 steps on 3 workers."""
  init, step = make(mesh_of(3), **options)
  state, losses = init(PARAMS), []
  for i in range(3):
    state, loss = step(state, batch_at(i))
    losses.append(float(loss))
  return state, losses


def find_padding(state):
  """Elements of parameters and moments that belong to no parameter."""
  cuts = state.opt_state.made_for.cuts
  trees = [state.params]
  trees += [optax.tree.get(state.opt_state, name) for name in ("mu", "nu")]
  return [
    np.delete(np.asarray(x), np.s_[: cut.shape[cut.dimension]], cut.dimension)
    for tree in trees
    for cut, x in zip(cuts, jax.tree.leaves(tree), strict=True)
    if cut.is_padded
  ]


def test_without_codecs_it_is_training_on_one_device():
  state, losses = train()
  params, alone = train_alone()
  np.testing.assert_allclose(losses, alone, rtol=1e-4)
  assert_close(jaxmotion.read_params(state), params, atol=1e-4)
  up = state.params["layers"]["up"]
  length = -(-HIDDEN // 3)
  assert up.shape == (LAYERS, WIDTH, 3 * length)
  parts = {s.data.shape for s in up.addressable_shards}
  assert parts == {(LAYERS, WIDTH, length)}
  padding = find_padding(state)
  assert len(padding) == 3 * 4
  assert all(a.size and not np.any(a) for a in padding)


def test_codecs_train_and_remember_what_they_left_out():
  state, losses = train(**CODED)
  np.testing.assert_allclose(losses, train_alone()[1], rtol=0.1)
  errors = state.opt_state.error.value
  assert errors and all(np.any(np.asarray(e)) for e in errors)
  assert not any(map(np.any, find_padding(state)))


def test_a_sign_which_has_no_zero_leaves_padding_alone():
  options = dict(gradient_codec=codecs.sign(), error_feedback=True)
  init, step = make(mesh_of(3), optax.sgd(1.0), **options)
  state, _ = step(init(PARAMS), batch_at(0))
  for cut, x in zip(
    state.opt_state.made_for.cuts, jax.tree.leaves(state.params), strict=True
  ):
    whole = np.asarray(cut.pad_leaf(cut.trim_leaf(x)))
    np.testing.assert_array_equal(x, whole)


def test_one_step_knows_shapes_of_the_same_padding_apart():
  init, step = jaxmotion.make_train_step(
    lambda w, x: jnp.mean(x) * gather_params(w).size,
    jaxmotion.fully_sharded(optax.sgd(0.1)),
    mesh_of(4),
  )
  losses = [step(init(jnp.ones((5, n))), jnp.ones(4))[1] for n in (63, 64)]
  assert list(map(float, losses)) == [5 * 63, 5 * 64]


def test_hosts_gather_and_remember_parts_with_padding():
  axes = jaxmotion.HostAxes("host", "device")
  mesh = mesh_of(2, 2, names=axes.names)
  coded = dict(gradient_codec=INT4, error_feedback=True, regather="local")
  init, step = make(mesh, optax.sgd(1.0), axes, **coded)
  state, _ = step(init(PARAMS), batch_at(0))
  means, cuts = [], state.opt_state.made_for.cuts
  parted = [cut for cut in cuts if cut.dimension]
  for cut, e in zip(parted, state.opt_state.error.value, strict=True):
    # Of each device the rows that it reduces, of each host its own mean.
    e = np.moveaxis(np.asarray(e), cut.dimension + 1, 0)
    rest = e.shape[2:]
    e = e.reshape(2, cut.length, 2, 2, *rest).mean(2)
    e = e.swapaxes(1, 2).reshape(4 * cut.length, *rest)
    means.append(np.moveaxis(e, 0, cut.dimension))
  left = (cut.trim_leaf(e) for cut, e in zip(parted, means, strict=True))
  held = jax.tree.leaves(jaxmotion.read_params(state))
  found = [
    p - x + (next(left) if cut.dimension else 0)
    for cut, p, x in zip(cuts, jax.tree.leaves(PARAMS), held, strict=True)
  ]
  assert_close(found, jax.jit(jax.grad(WHOLE))(PARAMS, batch_at(0)))


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_workers_pad_what_axes_of_the_model_do_not_shard(kind):
  mesh = mesh_of(2, 2, kind=kind)
  specs, params = {"w": P(None, "model")}, {"w": np.ones((33, 62), np.float32)}
  x = np.float32(RNG.normal(size=(8, 33)))
  init, step = jaxmotion.make_train_step(
    lambda p, x: jnp.mean(jnp.tanh(x @ gather_params(p["w"])) ** 2),
    jaxmotion.fully_sharded(
      optax.sgd(1.0), gradient_codec=INT4, error_feedback=True
    ),
    mesh,
    specs=specs,
  )
  with jax.set_mesh(mesh):
    state, _ = step(init(params), x)
    assert state.params["w"].shape == (34, 62)
    assert state.params["w"].sharding.spec == P("data", "model")
    whole = jaxmotion.read_params(state)["w"]
    traced = jax.jit(jaxmotion.read_params)(state)["w"]
  assert whole.sharding.spec[1] == "model" and bits(whole) == bits(traced)
  exact = jax.jit(jax.grad(lambda w, x: jnp.mean(jnp.tanh(x @ w) ** 2)))
  (error,) = state.opt_state.error.value
  found = params["w"] - whole + np.asarray(error).mean(0)[:33]
  np.testing.assert_allclose(found, exact(params["w"], x), atol=1e-6)


def test_an_optimizer_that_divides_by_zero_in_padding_does_no_harm():
  init, step = jaxmotion.make_train_step(
    lambda w, x: jnp.mean((x @ gather_params(w) - 3) ** 2),
    jaxmotion.fully_sharded(optax.adam(0.1, eps=0.0), weight_codec=INT8),
    mesh_of(4),
  )
  state, losses = init(jnp.ones((9, 61))), []
  for i in range(3):
    state, loss = step(state, 1 + abs(batch_at(i)[0] @ np.ones((7, 9))))
    losses.append(float(loss))
  assert np.all(np.isfinite(losses)) and losses[-1] < losses[0]


def test_a_state_of_other_workers_or_of_whole_parameters_is_refused():
  state = jax.eval_shape(make(mesh_of(4))[0], PARAMS)
  for workers, message in ((3, "that of 3 workers"), (2, "2, got one for 4")):
    _, step = make(mesh_of(workers))
    with pytest.raises(ValueError, match=message):
      step.eval_shape(state, batch_at(0))
  _, step = make(mesh_of(4))
  whole = state._replace(params=jax.tree.map(jnp.asarray, PARAMS))
  for read in (
    jaxmotion.read_params,
    lambda whole: step.eval_shape(whole, batch_at(0)),
  ):
    with pytest.raises(
      ValueError, match="`state/params/layers/bias` must have"
    ):
      read(whole)
