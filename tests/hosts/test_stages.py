"""Steps cut at their collectives compute what they compute whole."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec as P

from jaxmotion.hosts import mark_computed
from jaxmotion.hosts._sending import RECEIVED
from jaxmotion.hosts._stages import cut_at_collectives, cut_for_flight
from tests.meshes import mesh_of

pytestmark = pytest.mark.unoptimized
MESH = mesh_of(2)
X = np.random.default_rng(0).normal(size=(2, 512)).astype(np.float32)
LARGE = 1 << 15  # Elements of which a sum is sent alone.


def mapped(fun, outs, check_vma=True):
  return jax.shard_map(
    fun, mesh=MESH, in_specs=P("data"), out_specs=outs, check_vma=check_vma
  )


def run_cut(fun, *args, cut=cut_at_collectives):
  """Results of a function's programs, and what each of them is."""
  stages = cut(jax.make_jaxpr(fun)(*args))
  leaves = jax.tree.leaves(args)
  arrays = dict(zip(stages.inputs, leaves, strict=True)) | stages.constants
  for program in stages.programs:
    made = jax.jit(program.run)(*[arrays[i] for i in program.reads])
    arrays.update(zip(program.makes, made, strict=True))
  kinds = "".join("cs"[program.sends] for program in stages.programs)
  return [arrays[i] for i in stages.outputs], kinds, stages


def wide(x):
  return jnp.sin(jnp.broadcast_to(x, (LARGE // 512, 512)))


def test_sums_are_sent_in_turn_and_followed_up_in_the_end():
  def fun(x):
    first = lax.psum(wide(x[0]), "data")
    second = lax.psum(wide(2 * x[0]), "data")
    return first.sum(), second + first, x + 1

  whole = mapped(fun, (P(), P(), P("data")))
  found, kinds, stages = run_cut(whole, X)
  assert kinds == "cscscc"
  assert [p.is_symmetric for p in stages.programs if p.sends] == [True, True]
  jax.tree.map(np.testing.assert_array_equal, found, list(jax.jit(whole)(X)))


def test_results_are_handed_out_by_the_program_that_makes_them():
  def fun(x):
    first = lax.psum(wide(x[0]), "data")
    both = jnp.sin(first)
    second = lax.psum(both * x[0, 0], "data")
    return both, second

  whole = mapped(fun, (P(), P()))
  found, kinds, stages = run_cut(whole, X)
  assert kinds == "cscsc"
  both, second = stages.outputs
  makers = [both in p.makes for p in stages.programs]
  assert makers == [False, False, True, False, False]
  assert stages.programs[-1].makes == [second]
  jax.tree.map(np.testing.assert_array_equal, found, list(jax.jit(whole)(X)))


def test_swaps_have_no_order_of_the_devices():
  def cut(*pairs):
    fun = lambda x: lax.ppermute(wide(x[0]), "data", pairs)[None] + 1
    whole = mapped(fun, P("data"))
    return whole, cut_at_collectives(jax.make_jaxpr(whole)(X))

  _, one_way = cut((0, 1))
  whole, swapped = cut((0, 1), (1, 0))
  for stages, is_symmetric in ((one_way, False), (swapped, True)):
    sent = [p.is_symmetric for p in stages.programs if p.sends]
    assert sent == [is_symmetric]
  found, kinds, _ = run_cut(whole, X)
  assert kinds == "csc"
  np.testing.assert_array_equal(found[0], jax.jit(whole)(X))


def test_small_sums_travel_together_and_sums_of_sums_follow_them():
  def fun(x):
    mean = lax.pmean(x, "data")
    return lax.psum((x - mean) ** 2, "data"), lax.psum(3 * x, "data")

  found, kinds, _ = run_cut(mapped(fun, P()), X)
  assert kinds == "scsc"
  expected = ((X - X.mean(0)) ** 2).sum(0)[None]
  np.testing.assert_allclose(found[0], expected, rtol=1e-5)
  np.testing.assert_allclose(found[1], 3 * X.sum(0)[None], atol=1e-5)


def test_what_is_marked_ends_the_program_that_sends():
  def fun(x):
    total = lax.psum(x, "data")
    return jnp.cos(checkpoint_name(total - 1, RECEIVED))

  found, _, stages = run_cut(mapped(fun, P()), X)
  sending = next(p for p in stages.programs if p.sends)
  received = jax.jit(sending.run)(X)
  np.testing.assert_allclose(received[0], X.sum(0)[None] - 1, atol=1e-5)
  np.testing.assert_allclose(found[0], np.cos(received[0]), rtol=1e-6)


def test_workers_keep_their_own_values_from_program_to_program():
  def compute(x):
    return jnp.tanh(x)

  def update(x):
    index = lax.axis_index("data")
    total = lax.psum(x, "data")
    branch = lambda y: lax.psum(y, "data")
    other = lax.cond(total.sum() > 0, branch, branch, x * 2)
    return total + other, x * index

  def step(x):
    own = mapped(compute, P("data"), check_vma=False)(x)
    return mapped(update, (P(), P("data")))(own)

  found, kinds, stages = run_cut(step, X)
  assert kinds.count("s") == 2
  # A branch is no sum: what it sends keeps the order of the devices.
  assert [p.is_symmetric for p in stages.programs if p.sends] == [True, False]
  own = np.tanh(X)
  np.testing.assert_allclose(found[0], 3 * own.sum(0)[None], atol=1e-5)
  np.testing.assert_allclose(found[1], own * [[0], [1]], rtol=1e-6)


@pytest.mark.parametrize("kind", ("alone", "effects", "argument", "constant"))
def test_what_cannot_be_cut_stays_whole(kind):
  def fun(x):
    if kind == "alone":
      return x + 1
    if kind == "effects":
      jax.debug.print("{}", x[0, 0])
    return lax.psum(x, "data")

  def step(x):
    y = mapped(fun, P("data") if kind == "alone" else P())(x)
    return {"argument": (x, y), "constant": (y, 1.0)}.get(kind, y)

  assert cut_at_collectives(jax.make_jaxpr(step)(X)) is None


def test_a_flight_follows_what_the_next_step_needs_and_what_is_sent_at_once():
  def fun(x, kept):
    own = jnp.sin(x)
    change = mark_computed(own - 2 * kept)
    mean = lax.pmean(x.sum(), "data")
    total = lax.psum(change, "data") + 0.5 * kept
    return own, mean, total, kept

  specs = P("data"), P()
  whole = jax.shard_map(
    fun, mesh=MESH, in_specs=specs, out_specs=(P("data"), P(), P(), P())
  )
  kept = X[:1]
  found, kinds, stages = run_cut(
    whole, X, kept, cut=lambda closed: cut_for_flight(closed, [0])
  )
  assert kinds == "css"
  first, at_once, beside = stages.programs
  own, mean, total, passed = stages.outputs
  assert first.makes[0] is own and len(first.makes) == 2
  # What the next step writes to is read by the first program alone.
  x, passed_on = stages.inputs
  assert passed is passed_on
  assert (at_once.reads, at_once.makes) == ([x], [mean])
  assert beside.makes == [total] and x not in beside.reads
  expected = jax.jit(whole)(X, kept)
  jax.tree.map(np.testing.assert_array_equal, found, list(expected))


def test_what_needs_a_collective_is_not_cut_for_a_flight():
  def fun(x):
    total = lax.psum(x, "data")
    return total + 1, total

  closed = jax.make_jaxpr(mapped(fun, P()))(X)
  assert cut_for_flight(closed, [0]) is None
  assert cut_for_flight(closed, []) is not None
