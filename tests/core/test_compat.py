import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec as P

from jaxmotion.core import (
  assert_replicated,
  axis_is_bound,
  axis_names,
  axis_size,
  is_varying,
  to_varying,
  tracks_varying,
  varying_axes,
  worker_index,
)

MESH = Mesh(np.array(jax.devices()).reshape(2, 4), ("host", "device"))
BOTH = ("host", "device")
X = jnp.arange(16.0)
SAME = P()


def spread(fn, *args, in_specs=SAME, out_specs=SAME, **options):
  specs = dict(in_specs=in_specs, out_specs=out_specs)
  return jax.jit(jax.shard_map(fn, mesh=MESH, **specs, **options))(*args)


def seen(fn, *args, in_specs=SAME, **options):
  """What fn returns while it is traced, rather than what it computes."""
  found = []

  def body(*args):
    found.append(fn(*args))
    return jnp.zeros(())

  specs = dict(in_specs=in_specs, out_specs=SAME)
  jax.eval_shape(jax.shard_map(body, mesh=MESH, **specs, **options), *args)
  return found[0]


@pytest.mark.parametrize("name", ["data", ("host", "data")])
def test_an_axis_that_is_not_bound_is_named(name):
  assert not axis_is_bound(name)
  with pytest.raises(ValueError, match="`axis_name` must .*got") as e:
    axis_size(name)
  assert f"got {name!r}: train by" in str(e.value)
  with pytest.raises(ValueError, match="`axis_name` must name an axis"):
    seen(lambda: axis_size(name))
  with pytest.raises(ValueError, match="`axis_name` must name an axis"):
    worker_index(name)


@pytest.mark.parametrize(
  ("name", "end"),
  [
    ("hosts", "got 'hosts'; did you mean 'host'?"),
    (("host", "devise"), "got ('host', 'devise'); did you mean 'device'?"),
    ("rows", "got 'rows'."),
  ],
)
def test_a_misspelt_axis_is_told_the_axes_that_are_there(name, end):
  with pytest.raises(ValueError) as e:
    seen(lambda: axis_size(name))
  assert str(e.value) == (
    "`axis_name` must name an axis of the enclosing shard_map or pmap, which "
    f"has 'device', 'host', {end}"
  )


def test_axes_are_bound_and_have_sizes_only_inside():
  assert axis_names("data") == ("data",) and axis_names(BOTH) == BOTH
  sizes = lambda: [axis_size(a) for a in (*BOTH, BOTH)]
  assert seen(sizes) == [2, 4, 8]
  bound = lambda: [axis_is_bound(a) for a in (*BOTH, BOTH, "data")]
  assert seen(bound) == [True, True, True, False]
  assert not axis_is_bound("host")


def test_workers_are_counted_along_the_axis():
  def count():
    indices = [worker_index(axis) for axis in (*BOTH, BOTH)]
    return to_varying(jnp.stack(to_varying(indices, BOTH)), BOTH)[None]

  grid = np.arange(8)
  expected = np.stack([grid // 4, grid % 4, grid], 1)
  np.testing.assert_array_equal(spread(count, out_specs=P(BOTH)), expected)


@pytest.mark.parametrize(
  ("start", "axis"),
  [(P(), "host"), (P("host"), ("device", "host")), (P(BOTH), BOTH)],
)
def test_arrays_become_varying_and_keep_their_elements(start, axis):
  def cast(x):
    tree = to_varying({"a": x, "b": [x + 1]}, axis)
    before = varying_axes(x)
    for leaf in jax.tree.leaves(tree):
      assert varying_axes(leaf) == before | set(axis_names(axis))
    assert is_varying(tree["a"], axis)
    # A second cast changes nothing.
    assert to_varying(tree["a"], axis) is tree["a"]
    return to_varying(tree["a"], BOTH)

  y = spread(cast, X, in_specs=start, out_specs=P(BOTH))
  copies = {P(): 8, P("host"): 4, P(BOTH): 1}[start]
  parts = np.asarray(X).reshape(8 // copies, -1)
  np.testing.assert_array_equal(y.reshape(8, -1), np.repeat(parts, copies, 0))


def test_asserted_arrays_are_typed_as_replicated():
  def total(x):
    # Each worker adds up both rows; nobody but the program knows it.
    other = jax.lax.ppermute(x, "host", [(0, 1), (1, 0)])
    return assert_replicated(x + other, "host")

  def types(x):
    both = to_varying(x, BOTH)
    one = assert_replicated(both, "host")
    (all_of,) = assert_replicated((both,), BOTH)
    return varying_axes(one), varying_axes(all_of)

  assert seen(types, X) == (frozenset({"device"}), frozenset())
  y = spread(total, np.arange(2.0), in_specs=P("host"))
  np.testing.assert_array_equal(y, [1.0])
  # It can be vmapped and runs without jit.
  vmapped = jax.vmap(lambda a: assert_replicated(a, ()))(X)
  np.testing.assert_array_equal(vmapped, X)
  np.testing.assert_array_equal(assert_replicated(X, ()), X)


def test_gradients_of_varying_parameters_stay_with_their_worker():
  def grads(w, x):
    own = jax.grad(lambda w: (w * x).sum())(to_varying(w, BOTH))
    # Cast inside the function, the transpose of the cast is the sum again.
    return own, jax.grad(lambda w: (to_varying(w, BOTH) * x).sum())(w)

  specs = dict(in_specs=(P(), P(BOTH)), out_specs=(P(BOTH), P()))
  own, total = spread(grads, jnp.ones(2), X, **specs)
  np.testing.assert_array_equal(own, X)
  np.testing.assert_array_equal(total, X.reshape(8, 2).sum(0))


def test_a_value_varies_over_the_axes_of_its_spec_where_check_vma_is_on():
  varies = lambda x: tuple(is_varying(x, axis) for axis in (*BOTH, BOTH))
  assert seen(varies, X) == (False, False, False)
  assert seen(varies, X, in_specs=P("host")) == (True, False, True)
  assert seen(varies, X, in_specs=P(BOTH)) == (True, True, True)

  def types(x):
    cast = to_varying(x, BOTH)
    same = assert_replicated(cast, BOTH)
    tracked = {tracks_varying(axis) for axis in (*BOTH, BOTH)}
    return tracked, is_varying(cast, BOTH), is_varying(same, BOTH)

  options = dict(in_specs=P("host"))
  assert seen(types, X, **options) == ({True}, True, False)
  assert seen(types, X, **options, check_vma=False) == ({False}, False, False)


def test_nothing_is_tracked_under_pmap():
  def body(x):
    found = tracks_varying("d"), is_varying(x, "d"), axis_size("d")
    assert found == (False, False, 8)
    return to_varying(x, "d") + worker_index("d")

  y = jax.pmap(body, axis_name="d")(X.reshape(8, 2))
  np.testing.assert_array_equal(y, X.reshape(8, 2) + np.arange(8.0)[:, None])
