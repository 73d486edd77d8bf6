"""Results that differ between workers are found in any traced program."""

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec as P

from jaxmotion.program import find_varying

DATA = frozenset({"data"})


def varying(fun, own=0.0, equal=0.0):
  """Which results of (own, equal) differ between workers."""
  jaxpr, shapes = jax.make_jaxpr(
    fun, axis_env=[("data", 4), ("model", 2)], return_shape=True
  )(own, equal)
  found = find_varying(jaxpr, [DATA, frozenset()], DATA)
  return jax.tree.unflatten(jax.tree.structure(shapes), list(map(bool, found)))


def test_collectives_that_all_workers_receive_equalize():
  def fun(own, equal):
    index = lax.axis_index("data")
    row = jnp.broadcast_to(own, (4,))
    return {
      "own": own + equal,
      "equal": equal + 1,
      "mean": lax.pmean(own, "data"),
      "both": lax.psum((own, index), ("data", "model")),
      "other": lax.psum(own, "model"),
      "gathered": lax.all_gather(own, "data"),
      "index": index,
      "part": lax.psum_scatter(jnp.broadcast_to(equal, (4,)), "data"),
      "moved": lax.all_to_all(row, "data", 0, 0),
      "constant": 1.0,
    }

  found = varying(fun)
  assert found.pop("both") == (False, False)
  own = {"own", "other", "index", "part", "moved"}
  assert {name for name, is_own in found.items() if is_own} == own


def test_calls_are_entered():
  def fun(own, equal):
    a, b = jax.jit(lambda a, b: (lax.pmean(a, "data"), b))(own, equal)
    return a, jax.checkpoint(jnp.sin)(b), jax.vmap(jnp.cos)(jnp.stack([own]))

  assert varying(fun) == (False, False, True)


def test_values_of_given_names_count_as_equal():
  auto = (jax.sharding.AxisType.Auto,)
  mesh = jax.sharding.AbstractMesh((2,), ("model",), axis_types=auto)

  def name(x, name="gathered"):
    return checkpoint_name(x, name)

  def double(x):
    return jax.shard_map(
      lambda a: 2 * a, mesh=mesh, in_specs=P("model"), out_specs=P("model")
    )(x)

  def fun(own):
    return (
      name(own),
      name(own) + own,
      name(own, "other"),
      lax.scan(lambda c, x: (c + name(x), x), 0.0, own),
      lax.cond(True, name, jnp.sin, own),
      # Inside of a map over the model, an array has another shape.
      double(name(own)),
      double(own),
    )

  jaxpr, shapes = jax.make_jaxpr(fun, return_shape=True)(jnp.ones(4))
  found = find_varying(jaxpr, [DATA], DATA, frozenset({"gathered"}))
  assert jax.tree.unflatten(
    jax.tree.structure(shapes), list(map(bool, found))
  ) == (False, True, True, (False, True), True, False, True)


def test_carries_of_loops_are_followed_to_the_end():
  def fun(own, equal):
    # What comes in at `a` reaches `c` after two rounds.
    turn = lambda carry, x: ((own, carry[0], carry[1]), x)
    (a, b, c), xs = lax.scan(turn, (equal, equal, equal), jnp.arange(3.0))
    counted = lax.while_loop(
      lambda s: s[0] < 3, lambda s: (s[0] + 1, s[1] + own), (0, equal)
    )
    return a, b, c, xs, counted

  assert varying(fun) == (True, True, True, False, (False, True))


def test_own_conditions_make_own_results():
  def fun(own, equal):
    branch = lax.cond(own > 0, lambda: equal, lambda: equal + 1)
    shared = lax.cond(equal > 0, lambda: own, lambda: equal)
    same = lax.cond(equal > 0, lambda: equal + 1, lambda: equal)
    count = lax.while_loop(lambda s: s < own, lambda s: s + 1, equal)
    return branch, shared, same, count

  assert varying(fun) == (True, True, False, True)
