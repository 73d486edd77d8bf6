"""States that continue on other numbers of workers and with other codecs."""

import functools
import itertools
import json
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AbstractMesh, PartitionSpec as P

import jaxmotion
from jaxmotion import checkpoint, codecs, core, transforms
from tests.checkpoint.helpers import ONE, assert_equal, fill_randomly
from tests.meshes import mesh_of

PARAMS = {
  "w": np.zeros((24, 24), np.float32),  # Two phases on 3 workers or more.
  "b": np.zeros(5, np.float32),
}
CODEC = codecs.feedback(
  codecs.rules([("w", codecs.uniform(bits=4)), (".", codecs.topk(density=0.2))])
)


def make_tx(codec=CODEC, **options):
  return optax.chain(
    transforms.exchange("data", codec, **options), optax.trace(0.9)
  )


def read_values(state):
  """The errors that the only worker of a state remembers."""
  return [
    np.asarray(reduced.first.memory.value[0], np.float64)
    for reduced in state[0].codec_state.value
  ]


def read_outstanding(tx, state, layout):
  """What is still to be sent, by the state that keeps only the mean."""
  return read_values(checkpoint.resize(tx, state, PARAMS, layout, ONE))


def exchange_only(axis_name="data", **options):
  return optax.chain(transforms.exchange(axis_name, CODEC, **options))


def make_layouts(tx, shapes, axes):
  return [
    checkpoint.describe_state(
      tx, PARAMS, AbstractMesh(shape, core.axis_names(axes)), axis_name=axes
    )
    for shape in shapes
  ]


def resize_along(tx, state, layouts, axes):
  """Yields the state for each layout, resized from that of the one before."""
  for old, new in itertools.pairwise(layouts):
    names, lengths = zip(*new.workers, strict=True)
    state = checkpoint.resize(
      tx, state, PARAMS, old, AbstractMesh(lengths, names), axis_name=axes
    )
    yield state


def read_means(tx, states, layouts, axes):
  """The memory of each state as that of one worker, in one list each."""
  names = core.axis_names(axes)
  one = AbstractMesh((1,) * len(names), names)
  return [
    read_values(
      checkpoint.resize(tx, state, PARAMS, layout, one, axis_name=axes)
    )
    for state, layout in zip(states, layouts, strict=True)
  ]


@functools.cache
def make_filled():
  """A chain, and its state of four workers with the layout."""
  tx, mesh = make_tx(), mesh_of(4)
  state = fill_randomly(transforms.bind_mesh(tx, mesh).init(PARAMS))
  return tx, state, checkpoint.describe_state(tx, PARAMS, mesh)


def test_the_same_layout_keeps_every_bit():
  tx, state, layout = make_filled()
  again = checkpoint.resize(tx, state, PARAMS, layout, mesh_of(4))
  assert jax.tree.structure(again) == jax.tree.structure(state)
  assert_equal(again, state)


def test_arrays_of_one_shape_are_resized_as_each_alone():
  # Their memory is stacked.
  tx, mesh, two = exchange_only(), mesh_of(4), mesh_of(2)
  params = {"w1": PARAMS["w"], "w2": PARAMS["w"]}
  layout = checkpoint.describe_state(tx, params, mesh)
  (state,) = fill_randomly(transforms.bind_mesh(tx, mesh).init(params))
  (stack,) = state.codec_state.value
  (found,) = checkpoint.resize(tx, (state,), params, layout, two)
  for i, name in enumerate(params):
    take = lambda tree, i=i: jax.tree.map(lambda a: a[:, i], tree)
    alone = {name: params[name]}
    (own,) = transforms.bind_mesh(tx, mesh).init(alone)
    own = own._replace(codec_state=core.PerWorker([take(stack)]))
    layout = checkpoint.describe_state(tx, alone, mesh)
    (one,) = checkpoint.resize(tx, (own,), alone, layout, two)
    assert_equal(one.codec_state.value, take(found.codec_state.value))


def test_hosts_change_their_number_and_their_devices():
  axes = jaxmotion.HostAxes("host", "device")
  tx = exchange_only(axis_name=axes)
  layouts = make_layouts(tx, [(2, 2), (4, 2), (1, 4)], axes)
  one = mesh_of(1, 1, names=axes.names)
  state = checkpoint.saved_like(tx, PARAMS, layouts[0], one, axis_name=axes)
  states = list(resize_along(tx, fill_randomly(state), layouts, axes))
  # Devices of a host that held different copies of a small leaf have one now.
  first, last = read_means(tx, states, layouts[1:], axes)
  for a, b in zip(first, last, strict=True):
    np.testing.assert_allclose(a, b, rtol=0, atol=1e-6)
  assert any(np.abs(a).max() > 0.1 for a in first)


def test_axes_may_have_other_names_and_another_number():
  tx, state, layout = make_filled()
  axes = jaxmotion.HostAxes("host", "device")
  other = optax.chain(transforms.exchange(axes, CODEC), optax.trace(0.9))
  two = AbstractMesh((2, 1), axes.names)
  moved = checkpoint.resize(other, state, PARAMS, layout, two, axis_name=axes)
  (last,) = read_means(
    other, [moved], make_layouts(other, [(2, 1)], axes), axes
  )
  first = read_outstanding(tx, state, layout)
  for a, b in zip(first, last, strict=True):
    np.testing.assert_allclose(b, a, rtol=0, atol=1e-6)


def test_state_of_each_worker_is_mixed_or_taken_from_the_nearest():
  def init(params):
    del params
    return jaxmotion.PerWorker(
      {
        "mean": jnp.zeros((1, 2)),
        "count": jnp.zeros((1,), jnp.int32),
        "key": jax.random.split(jax.random.key(0), 1),
      }
    )

  tx = optax.GradientTransformation(init, lambda u, s, p=None: (u, s))
  layout = checkpoint.describe_state(tx, PARAMS, mesh_of(4))
  keys = jax.random.split(jax.random.key(1), 4)
  state = jaxmotion.PerWorker(
    {
      "mean": np.arange(8, dtype=np.float32).reshape(4, 2),
      "count": np.arange(4, dtype=np.int32),
      "key": keys,
    }
  )
  two = checkpoint.resize(tx, state, PARAMS, layout, mesh_of(2)).value
  np.testing.assert_array_equal(two["mean"], [[1, 2], [5, 6]])
  np.testing.assert_array_equal(two["count"], [0, 2])
  eight = checkpoint.resize(tx, state, PARAMS, layout, mesh_of(8)).value
  np.testing.assert_array_equal(eight["count"], np.repeat(np.arange(4), 2))
  data = np.asarray(jax.random.key_data(eight["key"]))
  assert len(np.unique(data, axis=0)) == 8


def test_a_layout_of_other_code_is_refused_by_what_differs():
  tx, mesh = make_tx(), mesh_of(2)
  layout = checkpoint.describe_state(tx, PARAMS, mesh)
  state = transforms.bind_mesh(tx, mesh).init(PARAMS)
  wide = PARAMS | {"w": np.zeros((24, 25), np.float32)}
  parts = transforms.sharded("data", optax.adam(0.1))
  four = checkpoint.describe_state(tx, PARAMS, mesh_of(4))
  for chain, params, given, match in (
    (tx, wide, layout, r"'w' is float32\[24, 25\], got"),
    (make_tx(op="sum"), PARAMS, layout, "`op` of `tx`, 'sum', got 'mean'"),
    (optax.sgd(0.1), PARAMS, layout, "the 0 exchanges of `tx`, got 1"),
    (tx, PARAMS, four, "`state` must be of `layout`"),
    (parts, PARAMS, layout, "be of `sharded`, .* got `exchange`"),
  ):
    with pytest.raises(ValueError, match=match):
      checkpoint.resize(chain, state, params, given, mesh)
  for data, match in (
    ({}, "version"),
    ({"version": 5, "workers": {}, "model": {}}, "KeyError: 'exchanges'"),
    (layout.to_dict() | {"version": 4}, "of version 5, got version 4"),
  ):
    with pytest.raises(ValueError, match=match):
      checkpoint.Layout.from_dict(data)


def test_axes_that_cut_a_model_in_another_order_are_refused():
  mesh = AbstractMesh((2, 2, 2), ("data", "row", "column"))
  specs = {"w": P(("row", "column")), "b": P()}
  tx = make_tx()
  layout = checkpoint.describe_state(tx, PARAMS, mesh, specs=specs)
  swapped = specs | {"w": P(("column", "row"))}
  # Devices would go on with the memory of other parts.
  with pytest.raises(
    ValueError, match="'w' is .*'column', 'row'.* got .*'row'"
  ):
    checkpoint.resize(tx, {}, PARAMS, layout, mesh, specs=swapped)


def test_a_file_keeps_what_states_say_they_are_made_for():
  axes = jaxmotion.HostAxes(("pod", "host"), "device")
  pair = [codecs.feedback(codecs.uniform(bits=n)) for n in (4, 8)]
  first = transforms.exchange(axes, pair, op="sum", method="gather")
  master = transforms.sharded(
    axes, optax.adam(0.1), weight_codec=codecs.uniform(bits=4)
  )
  mesh = AbstractMesh((2, 3, 2), axes.names)
  for tx in (first, master):
    layout = checkpoint.describe_state(tx, PARAMS, mesh, axis_name=axes)
    data = json.loads(json.dumps(layout.to_dict()))
    hosts = data["exchanges"][0]["axis_name"]
    assert hosts == {"hosts": ["pod", "host"], "devices": "device"}
    assert checkpoint.Layout.from_dict(data) == layout
    assert pickle.loads(pickle.dumps(layout)) == layout
    state = transforms.extend.trace_state(tx, PARAMS, mesh, axes)
    assert layout.exchanges == (state.made_for,)
    fewer = {"w": PARAMS["w"]}
    assert layout != checkpoint.describe_state(tx, fewer, mesh, axis_name=axes)


def test_a_list_of_one_codec_continues():
  tx = make_tx([codecs.feedback(codecs.sign())])
  layout = checkpoint.describe_state(tx, PARAMS, mesh_of(4))
  layout = checkpoint.Layout.from_dict(layout.to_dict())
  like = checkpoint.saved_like(tx, PARAMS, layout, mesh_of(1))
  two = checkpoint.resize(tx, fill_randomly(like), PARAMS, layout, mesh_of(2))
  fresh = transforms.bind_mesh(tx, mesh_of(2)).init(PARAMS)
  assert jax.tree.structure(two) == jax.tree.structure(fresh)
  assert jax.tree.map(np.shape, two) == jax.tree.map(np.shape, fresh)


def test_state_that_workers_share_is_kept_by_any_number():
  def make_exchange(rank):
    factors = codecs.feedback(codecs.low_rank(rank=rank))
    signs = codecs.feedback(codecs.sign())
    codec = codecs.rules([("w", factors), (".", signs)])
    return transforms.exchange(axes, codec)

  axes = jaxmotion.HostAxes("host", "device")
  four, three = (AbstractMesh((hosts, 2), axes.names) for hosts in (4, 3))
  tx = make_exchange(2)
  old, new = (
    transforms.extend.trace_state(tx, PARAMS, mesh, axes)
    for mesh in (four, three)
  )
  state = jax.tree.map(jnp.asarray, fill_randomly(old))
  layout = checkpoint.describe_state(tx, PARAMS, four, axis_name=axes)
  options = dict(layout=layout, mesh=three, axis_name=axes)
  found = checkpoint.resize(tx, state, PARAMS, **options)
  assert core.same_shapes(found, new)
  assert_equal(*map(core.shared_parts, (found, state)))
  # Another rank has no use for the old factors.
  found = checkpoint.resize(make_exchange(1), state, PARAMS, **options)
  (fresh,) = core.shared_parts(found.codec_state.value)
  assert fresh.value.shape == (2, 24, 1)
