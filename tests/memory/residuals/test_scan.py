"""Loops whose residuals are in host memory between the two passes."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.extend.core import Var
from jax.sharding import AxisType, PartitionSpec as P

from jaxmotion import codecs
from jaxmotion.memory import (
  OptimizerInBackward,
  compress_residuals,
  offload,
  residuals_of,
)
from tests.memory.residuals.nets import (
  distance,
  gradients,
  looped,
  make,
  plain_relu_gradients,
  relu_block,
  same,
  stacked,
)

INT8 = codecs.uniform(bits=8, block=128)


def test_offloading_encoded_residuals_changes_nothing():
  block, p, x = make("mlp")
  args = stacked(p, 3), x
  device, host = (
    gradients(compress_residuals(looped(block), codec), *args)
    for codec in (INT8, offload(INT8))
  )
  assert distance(device, host) < 1e-6


@pytest.mark.parametrize(
  "options", [{"reverse": True, "unroll": 2}, {"length": 1}, {"length": 0}]
)
def test_loops_with_options_of_scan(options):
  """With counters, constants of an outer trace and outputs of iterations."""
  _, p, x = make("mlp")
  count = options.get("length", 5)
  stack = jax.tree.map(
    lambda a: a * (1 + 0.1 * jnp.arange(count)).reshape(-1, 1, 1), stacked(p, 1)
  )

  def run(stack, x, scale):
    def iteration(carry, row):
      i, x = carry
      p, odd = row
      y = jnp.tanh(scale * jax.nn.gelu(x @ p["in"]) @ p["out"])
      x = jnp.where(odd, x, 0.5 * x) + y * (1 + i)
      return (i + 1, x), (jnp.mean(y), i)

    odd = jnp.arange(count) % 2 == 1
    (i, x), (means, seen) = lax.scan(iteration, (0, x), (stack, odd), **options)
    return jnp.sum(x**2) + jnp.sum(means * seen) + i

  fn = compress_residuals(run, offload(), params=(0, 2))

  def both_passes(fn):
    return jax.jit(jax.value_and_grad(fn, argnums=(0, 1, 2)))(stack, x, 0.7)

  (value, expected), (same_value, found) = both_passes(run), both_passes(fn)
  np.testing.assert_allclose(same_value, value, rtol=1e-6)
  for a, b in zip(*map(jax.tree.leaves, (expected, found)), strict=True):
    most = np.abs(a).max(initial=0)
    np.testing.assert_allclose(b, a, rtol=1e-5, atol=1e-6 * most)
  if options.get("reverse"):
    assert same(jax.jit(run)(stack, x, 0.7), jax.jit(fn)(stack, x, 0.7))


def test_a_loop_in_a_loop_fetches_no_stack_whole():
  block, p, x = make("mlp")
  grid = stacked(stacked(p, 2), 3)

  def inner(params, x):
    return lax.scan(lambda x, p: (block(p, x), None), x, params)[0]

  fn = compress_residuals(looped(inner), offload())
  expected = gradients(looped(inner), grid, x)
  assert distance(expected, gradients(fn, grid, x)) < 1e-6
  jaxpr = jax.make_jaxpr(jax.grad(fn))(grid, x).jaxpr
  of_one_iteration = sum(r.nbytes // 4 for r in residuals_of(block, p, x))
  transferred = [
    e.invars[0].aval
    for body in (jaxpr, *find_bodies(jaxpr))
    for e in body.eqns
    if e.primitive.name == "device_put"
  ]
  assert len(transferred) >= 4
  assert all(aval.size <= of_one_iteration for aval in transferred)


def test_overflowed_residuals_on_the_host_are_recomputed_and_counted():
  _, p, x = make("mlp")
  # The input is rounded unless something overflowed is recomputed from it.
  rules = [
    ("sparse", offload(codecs.zero_value(capacity=0.01))),
    ("dense/scan_0/", offload(INT8)),
    ("dense", offload()),
  ]
  fn = compress_residuals(looped(relu_block), rules, count_overflows=True)
  grad = jax.jit(jax.value_and_grad(fn, has_aux=True))
  (value, overflows), grads = grad(stacked(p, 3), x)
  assert int(overflows) == 3
  # Two programs may add in another order.
  assert distance(plain_relu_gradients(), (value, grads)) < 1e-6


def test_each_worker_sends_residuals_of_its_own():
  block, p, x = make("mlp")
  mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,))
  stack = stacked(p, 3)

  def run(fn):
    def local(p, x):
      return lax.psum(fn(p, x), "data")

    specs = dict(in_specs=(P(), P("data")), out_specs=P())
    sharded = jax.shard_map(local, mesh=mesh, **specs)
    return jax.jit(jax.grad(sharded))(stack, x)

  expected = run(looped(block))
  for codec, most in ((offload(), 1e-6), (INT8, 0.03)):
    found = run(compress_residuals(looped(block), codec))
    assert distance(expected, found) < most


def find_bodies(jaxpr):
  """Yields the bodies of all loops that transfer something, inner ones too."""
  for eqn in jaxpr.eqns:
    for value in eqn.params.values():
      inner = getattr(value, "jaxpr", value)
      if hasattr(inner, "eqns"):
        transfers = any(e.primitive.name == "device_put" for e in inner.eqns)
        if eqn.primitive.name == "scan" and transfers:
          yield inner
        yield from find_bodies(inner)


def make_steps():
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


@pytest.mark.parametrize("case", range(3))
def test_no_iteration_waits_for_its_own_transfers(case):
  """It sends buffers of the one before, and fetches those of the next."""
  step, *args = list(make_steps())[case]
  forward, backward = find_bodies(jax.make_jaxpr(step)(*args).jaxpr)
  (sent,) = [e for e in forward.eqns if e.primitive.name == "device_put"]
  assert sent.invars[0] in forward.invars
  (fetched,) = [e for e in backward.eqns if e.primitive.name == "device_put"]
  assert fetched.invars[0] in backward.invars
  unpacked, names = {fetched.outvars[0]}, set()
  for e in backward.eqns:
    if any(isinstance(v, Var) and v in unpacked for v in e.invars):
      unpacked.update(e.outvars)
      names.add(e.primitive.name)
  assert names <= {"split", "slice", "reshape"}
  assert any(v in unpacked for v in backward.outvars)
