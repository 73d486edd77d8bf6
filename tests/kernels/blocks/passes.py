"""Arguments of the block passes, and comparison of what they return."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from jaxmotion import make_key
from jaxmotion.kernels import ErrorMemory, blocks
from jaxmotion.kernels.blocks import _reference
from jaxmotion.kernels.sign import SignOp
from jaxmotion.kernels.ternary import TernaryOp


def arguments(case):
  """Returns the op of a case, its array, and a key if the op needs one."""
  x = jnp.asarray(case.array(), case.dtype)
  return case.op, x, make_key(3) if case.op.needs_key else None


def adds_up(op):
  """Returns whether scales are sums, whose order implementations choose."""
  return isinstance(op, SignOp) or (
    isinstance(op, TernaryOp) and not op.stochastic
  )


def check(op, got, expected):
  """Asserts that two payloads have the same bits, up to the order of sums."""
  for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
    assert (a.shape, a.dtype) == (b.shape, b.dtype)
    a, b = np.asarray(a), np.asarray(b)
    if adds_up(op) and a.dtype == np.float32:
      np.testing.assert_allclose(a, b, rtol=2.0**-20)
    else:
      assert a.tobytes() == b.tobytes()


@functools.partial(jax.jit, static_argnums=0)
def encoded(op, x, key):
  """Returns the payload of the reference."""
  return op.encode(x, key)


def memory_of(op, x, key):
  """Returns an error memory after one encoding."""
  value = 0.5 * x.astype(jnp.float32)[::-1]
  return ErrorMemory(jnp.int32(1), value, encoded(op, value, key))


def payloads_of(op, x, key, workers):
  """Returns the payloads of workers with different arrays."""
  rows = [encoded(op, x * (1 + w), key) for w in range(workers)]
  return jax.tree.map(lambda *a: jnp.stack(a), *rows)


def list_passes(case, implementation):
  """Returns each pass by one implementation, and its argument."""
  op, x, key = arguments(case)
  payloads = payloads_of(op, x, key, 2)
  force = {"implementation": implementation}
  return [
    (lambda x: blocks.encode(op, x, key, **force), x),
    (
      lambda m: blocks.encode_error(op, x, m, key, **force),
      memory_of(op, x, key),
    ),
    (lambda p: blocks.sum_decoded(op, p, x, **force), payloads),
    (lambda p: blocks.encode_mean(op, p, x, key, **force), payloads),
  ]


def check_encoding(implementation, case):
  """Asserts that an interpreted kernel encodes as the reference does."""
  op, x, key = arguments(case)
  encode = lambda x: implementation.encode(x, key, op=op, interpret=True)
  check(op, jax.jit(encode)(x), encoded(op, x, key))


def check_feedback(implementation, case, count):
  """Asserts that an interpreted kernel adds the error as the reference does."""
  op, x, key = arguments(case)
  memory = memory_of(op, x, key)._replace(count=jnp.int32(count))

  def encode(implementation, **options):
    return jax.jit(
      lambda x, m: implementation.encode_error(
        x, m, key, op=op, decay=1.0, **options
      )
    )(x, memory)

  got, v = encode(implementation, interpret=True)
  expected, w = encode(_reference)
  np.testing.assert_allclose(v, w, rtol=2.0**-20, atol=1e-30)
  check(op, (got,), (expected,))


def check_sum(implementation, case, workers):
  """Asserts that an interpreted kernel adds payloads as the reference does."""
  op, x, key = arguments(case)
  payloads = payloads_of(op, x, key, workers)

  def total(implementation, **options):
    return jax.jit(
      lambda p: implementation.sum_decoded(p, op=op, like=x, **options)
    )(payloads)

  got, expected = total(implementation, interpret=True), total(_reference)
  assert got.dtype == expected.dtype
  assert np.asarray(got).tobytes() == np.asarray(expected).tobytes()


def check_mean(implementation, case):
  """Asserts that an interpreted kernel encodes means as the reference does."""
  op, x, key = arguments(case)
  payloads = payloads_of(op, x, key, 2)

  def encode(implementation, **options):
    return jax.jit(
      lambda p: implementation.encode_mean(p, key, op=op, like=x, **options)
    )(payloads)

  check(op, encode(implementation, interpret=True), encode(_reference))
