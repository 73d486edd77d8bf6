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
  return jax.jit(
    jax.shard_map(
      fn, mesh=MESH, in_specs=in_specs, out_specs=out_specs, **options
    )
  )(*args)


def seen(fn, *args, **options):
  """What fn returns while it is traced, rather than what it computes."""
  found = []

  def body(*args):
    found.append(fn(*args))
    return jnp.zeros(())

  spread(body, *args, **options)
  return found[0]


def test_one_axis_is_a_tuple_of_one():
  assert axis_names("data") == ("data",)
  assert axis_names(BOTH) == BOTH


def test_sizes_are_products_of_the_axes():
  sizes = lambda: [axis_size(a) for a in ("host", "device", BOTH)]
  assert seen(sizes) == [2, 4, 8]


@pytest.mark.parametrize("name", ["data", ("host", "data")])
def test_an_axis_that_is_not_bound_is_named(name):
  assert not axis_is_bound(name)
  with pytest.raises(ValueError, match="`axis_name` must .*got") as e:
    axis_size(name)
  assert f"got {name!r}: train by" in str(e.value)
  with pytest.raises(ValueError, match="`axis_name` must name an axis"):
    spread(lambda: jnp.zeros(axis_size(name)))
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
    spread(lambda: jnp.zeros(axis_size(name)))
  assert str(e.value) == (
    "`axis_name` must name an axis of the enclosing shard_map or pmap, which "
    f"has 'device', 'host', {end}"
  )


def test_axes_are_bound_only_inside():
  bound = lambda: [axis_is_bound(a) for a in (*BOTH, BOTH, "data")]
  assert seen(bound) == [True, True, True, False]
  assert not axis_is_bound("host")


@pytest.mark.parametrize("axis", ["host", "device", BOTH])
def test_workers_are_counted_along_the_axis(axis):
  index = lambda: to_varying(worker_index(axis), BOTH).reshape(1)
  got = np.asarray(spread(index, out_specs=P(BOTH))).reshape(2, 4)
  grid = np.arange(8).reshape(2, 4)
  expected = {"host": grid // 4, "device": grid % 4, BOTH: grid}[axis]
  np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize("axis", ["host", BOTH, ("device", "host")])
@pytest.mark.parametrize("start", [P(), P("host"), P(BOTH)])
def test_arrays_become_varying_and_keep_their_elements(axis, start):
  def cast(x):
    tree = to_varying({"a": x, "b": [x + 1]}, axis)
    before = varying_axes(x)
    for leaf in jax.tree.leaves(tree):
      assert varying_axes(leaf) == before | set(axis_names(axis))
    assert is_varying(tree["a"], axis)
    return to_varying(tree["a"], BOTH)

  y = spread(cast, X, in_specs=start, out_specs=P(BOTH))
  copies = {P(): 8, P("host"): 4, P(BOTH): 1}[start]
  parts = np.asarray(X).reshape(8 // copies, -1)
  np.testing.assert_array_equal(
    np.asarray(y).reshape(8, -1), np.repeat(parts, copies, 0)
  )


def test_a_second_cast_changes_nothing():
  def types(x):
    once = to_varying(x, "host")
    return varying_axes(once), to_varying(once, "host") is once

  assert seen(types, X) == (frozenset({"host"}), True)


def test_a_value_varies_over_the_axes_of_its_spec_alone():
  def types(x):
    return is_varying(x, "host"), is_varying(x, "device"), is_varying(x, BOTH)

  assert seen(types, X, in_specs=P()) == (False, False, False)
  assert seen(types, X, in_specs=P("host")) == (True, False, True)
  assert seen(types, X, in_specs=P(BOTH)) == (True, True, True)


def test_asserted_arrays_are_typed_as_replicated():
  def total(x):
    # Each worker adds up both rows; nobody but the program knows it.
    other = jax.lax.ppermute(x, "host", [(0, 1), (1, 0)])
    return assert_replicated(x + other, "host")

  def types(x):
    both = to_varying(x, BOTH)
    return varying_axes(assert_replicated(both, "host")), varying_axes(
      assert_replicated((both,), BOTH)[0]
    )

  assert seen(types, X) == (frozenset({"device"}), frozenset())
  x = np.arange(2.0)
  y = spread(total, x, in_specs=P("host"), out_specs=P())
  np.testing.assert_array_equal(y, [1.0])


def test_the_assertion_can_be_vmapped_and_runs_without_jit():
  x = jnp.arange(3.0)
  y = jax.vmap(lambda a: assert_replicated(a, ()))(x)
  np.testing.assert_array_equal(y, x)
  np.testing.assert_array_equal(assert_replicated(x, ()), x)


def test_gradients_of_varying_parameters_stay_with_their_worker():
  def grads(w, x):
    return jax.grad(lambda w: (to_varying(w, BOTH) * x).sum())(w)

  def own(w, x):
    return jax.grad(lambda w: (w * x).sum())(to_varying(w, BOTH))

  w = jnp.ones(2)
  specs = {"in_specs": (P(), P(BOTH))}
  np.testing.assert_array_equal(
    spread(own, w, X, out_specs=P(BOTH), **specs), X
  )
  # Cast inside the function, the transpose of the cast is the sum again.
  np.testing.assert_array_equal(
    spread(grads, w, X, **specs), X.reshape(8, 2).sum(0)
  )


@pytest.mark.parametrize("axis", ["host", "device", BOTH])
def test_types_are_tracked_where_check_vma_is_on(axis):
  assert seen(lambda: tracks_varying(axis))
  assert not seen(lambda: tracks_varying(axis), check_vma=False)


def test_nothing_is_tracked_without_check_vma():
  def types(x):
    cast = to_varying(x, BOTH)
    same = assert_replicated(cast, BOTH)
    return is_varying(cast, BOTH), is_varying(same, BOTH), axis_size(BOTH)

  got = seen(types, X, in_specs=P("host"), check_vma=False)
  assert got == (False, False, 8)


def test_nothing_is_tracked_under_pmap():
  found = []

  def body(x):
    found.append((tracks_varying("d"), is_varying(x, "d"), axis_size("d")))
    return to_varying(x, "d") + worker_index("d")

  y = jax.pmap(body, axis_name="d")(X.reshape(8, 2))
  assert found[0] == (False, False, 8)
  np.testing.assert_array_equal(y, X.reshape(8, 2) + np.arange(8.0)[:, None])
