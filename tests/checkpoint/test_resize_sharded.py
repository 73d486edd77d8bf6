"""States of sharded optimizers and models that continue on other workers."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import (
  AbstractMesh,
  AxisType,
  Mesh,
  NamedSharding,
  PartitionSpec as P,
)

import jaxmotion
from jaxmotion import checkpoint, codecs, core, transforms
from jaxmotion.memory import compress_state
from tests.checkpoint.helpers import ONE, fill_randomly, make_mesh

PARAMS = {
  "p": np.zeros((25, 26), np.float32),  # Padded, whatever workers cut it.
  "v": np.zeros(300, np.float32),  # Whole on 8 workers.
}
MEMORY = codecs.feedback(codecs.sign())
INT4 = codecs.uniform(bits=4)


def make_tx(gradient_codec=MEMORY, inner=None, **options):
  options = {"weight_codec": INT4} | options
  return jaxmotion.sharded(
    options.pop("axis_name", "data"),
    optax.adam(0.1) if inner is None else inner,
    gradient_codec=gradient_codec,
    **options,
  )


def read_whole(tx, state, layout, params=PARAMS, mesh=ONE, **options):
  """(errors, masters, first moments) by path, of the state of one worker."""
  one = checkpoint.resize(tx, state, params, layout, mesh, **options)
  cut, whole = one.codec_state.value
  values = [m.memory.value[0, 0] for m in cut]
  values += [reduced.first.memory.value[0] for reduced in whole]
  paths = {a.shape: k for k, a in params.items()}
  errors = {paths[a.shape]: np.asarray(a, np.float64) for a in values}
  mu = optax.tree.get(one, "mu", default=None)
  return errors, one.master.value, mu


def test_every_resize_keeps_what_is_to_be_sent_and_all_moments():
  tx = make_tx()
  meshes = [AbstractMesh((n,), ("data",)) for n in (4, 2, 8, 3)]
  layouts = [checkpoint.describe_state(tx, PARAMS, m) for m in meshes]
  like = checkpoint.saved_like(tx, PARAMS, layouts[0], make_mesh(1))
  state = fill_randomly(like)
  found = [read_whole(tx, state, layouts[0])]
  for old, mesh, new in zip(layouts, meshes[1:], layouts[1:], strict=False):
    state = checkpoint.resize(tx, state, PARAMS, old, mesh)
    assert jax.tree.map(np.shape, state) == jax.tree.map(
      np.shape, checkpoint.saved_like(tx, PARAMS, new, make_mesh(1))
    )
    found.append(read_whole(tx, state, new))
  (four, two, eight, three), masters, moments = zip(*found, strict=True)
  for k, a in PARAMS.items():
    scale = 4 * np.abs(four[k]).max()
    assert four[k].any()
    np.testing.assert_allclose(two[k], four[k], rtol=0, atol=scale * 2.0**-24)
    np.testing.assert_array_equal(eight[k], two[k])
    np.testing.assert_allclose(
      three[k], eight[k], rtol=0, atol=scale * 2.0**-22
    )
    for trees in (masters, moments):
      for other in trees[1:]:
        np.testing.assert_array_equal(other[k], trees[0][k])
      assert trees[0][k].shape == a.shape and np.any(np.asarray(trees[0][k]))


@functools.cache
def make_step(tx, mesh, axes):
  @jax.jit
  def step(grads, params, state):
    like = jax.eval_shape(
      lambda: transforms.init_state(tx, params, mesh, axis_name=axes)
    )
    specs = jaxmotion.state_specs(like, axes)
    return jax.shard_map(
      lambda g, p, s: tx.update(jax.tree.map(lambda a: a[0], g), s, p),
      mesh=mesh,
      in_specs=(P(core.axis_names(axes)), P(), specs),
      out_specs=(P(), specs),
    )(grads, params, state)

  return step


def draw_gradients(params, workers, rng):
  return {
    k: rng.normal(size=(workers, *a.shape)).astype(np.float32)
    + np.arange(workers, dtype=np.float32).reshape(-1, *[1] * a.ndim)
    for k, a in params.items()
  }


HOSTS = jaxmotion.HostAxes("host", "device")


def test_what_hosts_send_and_remember_adds_up():
  counts, axes = ((2, 2), (3, 1)), HOSTS
  tx = make_tx(
    inner=optax.sgd(1.0),
    axis_name=axes,
    weight_codec=codecs.identity(),
  )
  params, rng = PARAMS, np.random.default_rng(0)
  exact = {k: np.zeros(a.shape) for k, a in params.items()}
  state, layout, start = None, None, params
  for count in counts:
    devices = np.array(jax.devices()[: int(np.prod(count))])
    mesh = Mesh(devices.reshape(count), axes.names)
    if state is None:
      state = transforms.init_state(tx, params, mesh, axis_name=axes)
    else:
      state = checkpoint.resize(tx, state, params, layout, mesh, axis_name=axes)
    layout = checkpoint.describe_state(tx, params, mesh, axis_name=axes)
    grads = draw_gradients(params, devices.size, rng)
    params = jax.tree.map(np.asarray, params)
    updates, state = make_step(tx, mesh, axes)(grads, params, state)
    params = jax.tree.map(np.add, params, jax.tree.map(np.asarray, updates))
    for k in exact:
      exact[k] += grads[k].astype(np.float64).mean(0)
  one = AbstractMesh((1, 1), axes.names)
  errors, masters, _ = read_whole(
    tx, state, layout, params, one, axis_name=axes
  )
  for k, a in start.items():
    sent = a - np.asarray(masters[k], np.float64)
    bound = 1e-6 * np.abs(exact[k]).max()
    np.testing.assert_allclose(sent + errors[k], exact[k], rtol=0, atol=bound)
    assert np.abs(errors[k]).max() > 1e-3


SMALL = {"w": np.zeros((24, 24), np.float32), "b": np.zeros(5, np.float32)}


@functools.cache
def make_filled():
  tx = make_tx()
  layout = checkpoint.describe_state(tx, SMALL, AbstractMesh((4,), ("data",)))
  like = checkpoint.saved_like(tx, SMALL, layout, make_mesh(1))
  return tx, fill_randomly(like), layout


def test_another_codec_continues_the_memory_or_says_what_is_lost():
  tx, state, layout = make_filled()
  mesh = make_mesh(2)
  other = make_tx(codecs.feedback(INT4), weight_codec=codecs.identity())
  moved = checkpoint.resize(other, state, SMALL, layout, mesh)
  today = checkpoint.describe_state(other, SMALL, mesh)
  found = read_whole(other, moved, today, SMALL)
  for a, b in zip(found, read_whole(tx, state, layout, SMALL), strict=True):
    jax.tree.map(
      functools.partial(np.testing.assert_allclose, rtol=0, atol=1e-6), a, b
    )
  with pytest.raises(ValueError, match="`tx` must have error memory for 'b'"):
    checkpoint.resize(make_tx(INT4), state, SMALL, layout, mesh)
  fresh = checkpoint.resize(
    make_tx(INT4), state, SMALL, layout, mesh, reset_memory=True
  )
  assert not jax.tree.leaves(fresh.codec_state)
  with pytest.raises(ValueError, match="`master` arrays .* 2 of them, got 0"):
    bare = make_tx(weight_codec=None)
    checkpoint.resize(bare, state, SMALL, layout, mesh)
  theirs = checkpoint.describe_state(bare, SMALL, make_mesh(4))
  none = dataclasses.replace(state.master, value=(), dimensions=())
  made_for = dataclasses.replace(state.made_for, weight_codec=None)
  with pytest.raises(ValueError, match="`state` must be of `layout`, made for"):
    checkpoint.resize(tx, state, SMALL, theirs, mesh)
  held = state._replace(master=none, made_for=made_for)
  with pytest.raises(ValueError, match="0 of them, got 2. Give `weight_codec="):
    checkpoint.resize(tx, held, SMALL, theirs, mesh)


def test_the_same_layout_keeps_every_bit():
  tx, state, layout = make_filled()
  again = checkpoint.resize(tx, state, SMALL, layout, make_mesh(4))
  assert jax.tree.structure(again) == jax.tree.structure(state)
  jax.tree.map(np.testing.assert_array_equal, again, state)
  mu = again.inner.value[0].mu["w"]
  assert {s.data.shape for s in mu.addressable_shards} == {(6, 24)}


def test_what_is_no_array_of_a_parameters_shape_is_refused_on_others():
  tx = make_tx(inner=compress_state(optax.adam(0.1), min_leaf_size=64))
  four = AbstractMesh((4,), ("data",))
  layout = checkpoint.describe_state(tx, SMALL, four)
  like = checkpoint.saved_like(tx, SMALL, layout, make_mesh(1))
  state = fill_randomly(like)
  with pytest.raises(
    ValueError, match="`tx` must keep .* `inner/.*compress_st"
  ):
    checkpoint.resize(tx, state, SMALL, layout, make_mesh(2))
  again = checkpoint.resize(tx, state, SMALL, layout, four)
  jax.tree.map(np.testing.assert_array_equal, again, state)


MODEL = {
  "b": np.zeros(8, np.float32),
  "w1": np.zeros((12, 32), np.float32),
  "w2": np.zeros((32, 12), np.float32),
}
SPECS = {"b": P(), "w1": P(None, "model"), "w2": P("model")}


def linear_loss(params, batch):
  """The gradient of an example is itself."""
  return sum(jnp.sum(params[k] * jnp.mean(batch[k], 0)) for k in params)


def mesh_of(*counts, kind=AxisType.Auto):
  devices = np.array(jax.devices()[: int(np.prod(counts))])
  return Mesh(
    devices.reshape(counts), ("data", "model"), axis_types=(kind,) * 2
  )


def place_params(params, mesh):
  return {
    k: jax.device_put(a, NamedSharding(mesh, SPECS[k]))
    for k, a in params.items()
  }


def read_model(tx, state, layout, kind):
  """What is still to be sent, by the state of one worker."""
  one = AbstractMesh((1, 2), ("data", "model"), axis_types=(kind,) * 2)
  state = checkpoint.resize(tx, state, MODEL, layout, one, specs=SPECS)
  likes = [(node, a) for node, a in jax.tree.leaves_with_path(state)]
  values = [
    np.asarray(a, np.float64)
    for path, a in likes
    if "codec_state" in str(path)
    and ".memory.value" in jax.tree_util.keystr(path)
  ]
  found = {}
  for a in values:  # Rows of two devices, of one worker.
    shards = a.reshape(2, *[n for n in a.shape[1:] if n > 1])
    if shards.shape[1:] == (8,):
      found["b"] = shards[0]
    else:
      name, axis = ("w1", 1) if shards.shape[1:] == (12, 16) else ("w2", 0)
      found[name] = np.concatenate(list(shards), axis)
  return found


@pytest.mark.parametrize(
  ("parts", "kind"), [(True, AxisType.Auto), (False, AxisType.Explicit)]
)
def test_workers_change_beside_an_axis_of_the_model(parts, kind):
  if parts:
    tx = make_tx(inner=optax.sgd(1.0), gradient_codec=MEMORY)
  else:
    exchange = jaxmotion.exchange("data", MEMORY)
    tx = optax.chain(exchange, optax.sgd(1.0))
  rng, exact = np.random.default_rng(0), dict.fromkeys(MODEL, 0.0)
  params, state, layout = MODEL, None, None
  for workers in (2, 3):
    mesh = mesh_of(workers, 2, kind=kind)
    with jax.set_mesh(mesh):
      init, step = jaxmotion.make_train_step(linear_loss, tx, mesh, specs=SPECS)
      if state is None:
        state = init(params)
      else:
        held = checkpoint.resize(
          tx, state.opt_state, params, layout, mesh, specs=SPECS
        )
        state = state._replace(
          params=place_params(params, mesh), opt_state=held
        )
      places = jax.tree.map(lambda a: a.sharding, state)
      layout = checkpoint.describe_state(tx, params, mesh, specs=SPECS)
      batch = draw_gradients(MODEL, 6, rng)
      state, _ = step(state, batch)
      for place, a in zip(
        jax.tree.leaves(places), jax.tree.leaves(state), strict=True
      ):
        assert a.sharding.is_equivalent_to(place, a.ndim)
      params = jax.tree.map(np.asarray, state.params)
      for k in exact:
        exact[k] += batch[k].astype(np.float64).mean(0)
  layout = checkpoint.Layout.from_dict(layout.to_dict())
  assert layout == checkpoint.describe_state(tx, MODEL, mesh, specs=SPECS)
  state = state.opt_state
  left = read_model(tx, state, layout, kind)
  held = state.master.value if parts else params
  for k in MODEL:
    sent = -np.asarray(held[k], np.float64)
    bound = 1e-6 * np.abs(exact[k]).max()
    np.testing.assert_allclose(sent + left[k], exact[k], rtol=0, atol=bound)
    assert np.abs(left[k]).max() > 1e-3
  other = mesh_of(2, 1, kind=kind)
  with pytest.raises(
    ValueError, match="`specs` must shard the model .*'model'"
  ):
    checkpoint.resize(tx, state, MODEL, layout, other, specs=SPECS)


def test_a_step_names_moments_that_other_workers_cut():
  """Neither a master nor error memory says how many workers there were."""
  tx = jaxmotion.sharded("data", optax.adam(0.1))
  params = {"p": PARAMS["p"]}
  for workers, message in (
    (3, "`opt_state` must be of the 3 workers .*checkpoint.resize"),
    (2, "`state/inner` must be like .*checkpoint.resize"),
  ):
    four, mesh = AbstractMesh((4,), ("data",)), make_mesh(workers)
    layout = checkpoint.describe_state(tx, params, four)
    state = checkpoint.saved_like(tx, params, layout, make_mesh(1))
    state = jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), state)
    _, step = jaxmotion.make_train_step(
      lambda p, x: jnp.sum(p["p"] * jnp.mean(x)), tx, mesh, donate=False
    )
    with pytest.raises(ValueError, match=message):
      held = jax.tree.map(jnp.asarray, params)
      state = transforms.TrainState(held, None, state)
      step.lower(state, jnp.ones(6))
