"""The block passes with arguments, and comparison of what they return."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from jaxmotion import make_key
from jaxmotion.kernels import ErrorMemory, blocks
from jaxmotion.kernels.sign import SignOp
from jaxmotion.kernels.ternary import TernaryOp
from tests.kernels.lowering import interpret

PASSES = ("encode", "error", "sum", "mean")


def arguments(case):
  """Returns the op of a case, its array, and a key if the op needs one."""
  x = jnp.asarray(case.array(), case.dtype)
  return case.op, x, make_key(3) if case.op.needs_key else None


@functools.partial(jax.jit, static_argnums=0)
def encoded(op, x, key):
  """Returns the payload of the reference."""
  return op.encode(x, key)


def payloads_of(op, x, key, workers):
  """Returns the payloads of workers with different arrays."""
  rows = [encoded(op, x * (1 + w), key) for w in range(workers)]
  return jax.tree.map(lambda *a: jnp.stack(a), *rows)


def find_pass(name, case, implementation, *, workers=2, count=1):
  """Returns a pass by one implementation, and its argument."""
  op, x, key = arguments(case)
  force = {"implementation": implementation}
  if name == "encode":
    return (lambda x: blocks.encode(op, x, key, **force)), x
  if name == "error":
    value = 0.5 * x.astype(jnp.float32)[::-1]
    memory = ErrorMemory(jnp.int32(count), value, encoded(op, value, key))
    return (lambda m: blocks.encode_error(op, x, m, key, **force)), memory
  payloads = payloads_of(op, x, key, workers)
  if name == "sum":
    return (lambda p: blocks.sum_decoded(op, p, x, **force)), payloads
  return (lambda p: blocks.encode_mean(op, p, x, key, **force)), payloads


def check_pass(name, case, implementation, **sizes):
  """Asserts that an interpreted kernel returns what the reference does."""
  fn, argument = find_pass(name, case, implementation, **sizes)
  got = jax.jit(interpret(fn))(argument)
  reference, _ = find_pass(name, case, "reference", **sizes)
  expected = jax.jit(reference)(argument)
  if name == "error":
    (got, v), (expected, w) = got, expected
    np.testing.assert_allclose(v, w, rtol=2.0**-20, atol=1e-30)
  check(None if name == "sum" else case.op, got, expected)


def check(op, got, expected):
  """Asserts that two payloads have the same bits, up to the order of sums."""
  # Scales that are sums: implementations choose the order.
  adds_up = isinstance(op, SignOp) or (
    isinstance(op, TernaryOp) and not op.stochastic
  )
  for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
    assert (a.shape, a.dtype) == (b.shape, b.dtype)
    a, b = np.asarray(a), np.asarray(b)
    if adds_up and a.dtype == np.float32:
      np.testing.assert_allclose(a, b, rtol=2.0**-20)
    else:
      assert a.tobytes() == b.tobytes()
