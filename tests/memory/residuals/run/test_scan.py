"""Loops whose residuals are on the host between the two passes."""

import jax
import jax.numpy as jnp
import optax
import pytest
from jax import lax
from jax.extend.core import Var
from jax.sharding import PartitionSpec as P

from jaxmotion import codecs
from jaxmotion.memory import OptimizerInBackward, compress_residuals, offload
from jaxmotion.memory.residuals import residuals_of
from tests.memory.residuals.nets import (
  NAMES,
  distance,
  looped,
  make,
  same,
  stacked,
)

INT8 = codecs.uniform(bits=8, block=128)


def gradients(fn, *args):
  return jax.jit(jax.value_and_grad(fn, argnums=(0, 1)))(*args)


@pytest.mark.parametrize("name", [n for n in NAMES if n != "pool"])
def test_words_come_back(name):
  block, p, x = make(name)
  args = stacked(p, 3), x
  expected = gradients(looped(block), *args)
  there = gradients(compress_residuals(looped(block), offload()), *args)
  assert distance(expected, there) < 1e-6
  packed = gradients(compress_residuals(looped(block), offload(INT8)), *args)
  here = gradients(compress_residuals(looped(block), INT8), *args)
  assert distance(here, packed) < 1e-6


@pytest.mark.parametrize(
  "options", [{"reverse": True}, {"unroll": 2}, {"length": 1}, {"length": 0}]
)
def test_any_loop(options):
  """With counters, constants of an outer trace and results of each turn."""
  _, p, x = make("mlp")
  count = options.get("length", 5)
  stack = jax.tree.map(
    lambda a: a * (1 + 0.1 * jnp.arange(count)).reshape(-1, 1, 1),
    stacked(p, 1),
  )

  def run(stack, x, scale):
    def turn(carry, own):
      i, x = carry
      p, odd = own
      y = jnp.tanh(scale * jax.nn.gelu(x @ p["in"]) @ p["out"])
      x = jnp.where(odd, x, 0.5 * x) + y * (1 + i)
      return (i + 1, x), (jnp.mean(y), i)

    odd = jnp.arange(count) % 2 == 1
    (i, x), (means, seen) = lax.scan(turn, (0, x), (stack, odd), **options)
    return jnp.sum(x**2) + jnp.sum(means * seen) + i

  fn = compress_residuals(run, offload(), params=(0, 2))

  def both(fn):
    return jax.jit(jax.value_and_grad(fn, argnums=(0, 1, 2)))(stack, x, 0.7)

  (value, expected), (same_value, found) = both(run), both(fn)
  assert abs(value - same_value) <= 1e-6 * abs(value)
  if count:
    assert distance(expected, found) < 1e-6
  else:
    assert same(expected, found)
  assert same(jax.jit(run)(stack, x, 0.7), jax.jit(fn)(stack, x, 0.7))


def test_a_loop_in_a_loop():
  block, p, x = make("mlp")
  grid = stacked(stacked(p, 2), 3)

  def inner(own, x):
    return lax.scan(lambda x, p: (block(p, x), None), x, own)[0]

  expected = gradients(looped(inner), grid, x)
  found = gradients(compress_residuals(looped(inner), offload()), grid, x)
  assert distance(expected, found) < 1e-6


def test_what_had_no_room_is_computed_again_and_counted():
  def block(p, x):
    return jax.nn.relu(x @ p["in"] - 0.2) @ p["out"]

  _, p, x = make("mlp")
  p = stacked(p, 3)
  expected = jax.jit(jax.value_and_grad(looped(block)))(p, x)
  for capacity, often in ((0.01, 3), (0.9, 0)):
    codec = offload(codecs.zero_value(capacity=capacity))
    fn = compress_residuals(looped(block), codec, count_overflows=True)
    (value, overflows), grads = jax.jit(jax.value_and_grad(fn, has_aux=True))(
      p, x
    )
    assert int(overflows) == often
    assert same(expected, (value, grads))


def test_each_worker_has_its_own():
  block, p, x = make("mlp")
  mesh = jax.make_mesh(
    (2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,)
  )
  stack = stacked(p, 3)

  def run(fn):
    def local(p, x):
      return lax.psum(fn(p, x), "data")

    sharded = jax.shard_map(
      local, mesh=mesh, in_specs=(P(), P("data")), out_specs=P()
    )
    return jax.jit(jax.grad(sharded))(stack, x)

  found = run(compress_residuals(looped(block), offload()))
  assert distance(run(looped(block)), found) < 1e-6


def bodies(jaxpr):
  """The bodies of all loops that move something, inner ones too."""
  for eqn in jaxpr.eqns:
    for value in eqn.params.values():
      inner = getattr(value, "jaxpr", value)
      if hasattr(inner, "eqns"):
        moves = any(e.primitive.name == "device_put" for e in inner.eqns)
        if eqn.primitive.name == "scan" and moves:
          yield inner
        yield from bodies(inner)


def steps():
  block, p, x = make("mlp")
  stack = stacked(p, 3)
  yield jax.grad(compress_residuals(looped(block), offload(INT8))), stack, x

  def loss(x):
    return jnp.sum(x**2)

  for segment in (None, 1):
    model = OptimizerInBackward(
      [(block, 3)], loss, optax.sgd(0.1), codec=offload(INT8), segment=segment
    )
    yield model.step, [stack], model.init([stack]), x


def test_no_stack_is_fetched_whole():
  block, p, x = make("mlp")

  def inner(own, x):
    return lax.scan(lambda x, p: (block(p, x), None), x, own)[0]

  fn = compress_residuals(looped(inner), offload())
  grid = stacked(stacked(p, 2), 3)
  jaxpr = jax.make_jaxpr(jax.grad(fn))(grid, x).jaxpr
  of_a_turn = sum(r.nbytes // 4 for r in residuals_of(block, p, x))
  moved = [
    e.invars[0].aval
    for body in (jaxpr, *bodies(jaxpr))
    for e in body.eqns
    if e.primitive.name == "device_put"
  ]
  assert len(moved) >= 4
  assert all(aval.size <= of_a_turn for aval in moved)


@pytest.mark.parametrize("case", range(3))
def test_a_turn_waits_for_nothing_that_moves(case):
  """What goes was made by the turn before; what comes is for the next."""
  step, *args = list(steps())[case]
  there, back = bodies(jax.make_jaxpr(step)(*args).jaxpr)
  (sent,) = [e for e in there.eqns if e.primitive.name == "device_put"]
  assert sent.invars[0] in there.invars
  (fetched,) = [e for e in back.eqns if e.primitive.name == "device_put"]
  assert fetched.invars[0] in back.invars
  unpacked, names = {fetched.outvars[0]}, set()
  for e in back.eqns:
    if any(isinstance(v, Var) and v in unpacked for v in e.invars):
      unpacked.update(e.outvars)
      names.add(e.primitive.name)
  assert names <= {"split", "slice", "reshape"}
  assert any(v in unpacked for v in back.outvars)
