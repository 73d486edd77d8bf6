"""Parts of payloads, each of which one worker averages."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmotion import codecs
from jaxmotion.core import same_shapes

ROWS, FLAT = (512, 96), (20011,)
CASES = [
  (codecs.uniform(bits=8, block=64), ROWS),
  (codecs.uniform(bits=3, block=64), FLAT),
  (codecs.uniform(bits=4, block=64, symmetric=False), FLAT),
  (codecs.sign(block=64), ROWS),
  (codecs.ternary(rounding="threshold", block=64), FLAT),
  (codecs.topk(density=0.01), ROWS),
  (codecs.topk(density=0.1, block=20), FLAT),
  (codecs.feedback(codecs.sign(block=64)), FLAT),
  (
    codecs.momentum_correction(codecs.feedback(codecs.topk(density=0.01))),
    FLAT,
  ),
]
WORKERS = 3


def divide_values(division, x):
  """Returns the elements of each part; what only fills up a part is zero."""
  planes, _, *width = division.like.shape
  cut = planes, division.blocks, *width
  flat = jnp.pad(x.reshape(-1), (0, math.prod(cut) - x.size))
  return division._divide_leaf(flat.reshape(cut))


@functools.partial(jax.jit, static_argnums=0)
def run(codec, x):
  payload, _ = codec.encode(x, codec.init(x))
  division = codec.division(x, WORKERS)
  parts = division.divide(payload)
  decoded = jax.vmap(lambda p: codec.decode(p, division.like))(parts)
  whole = codec.decode(payload, x)
  # What only fills up a part is zeros in one and anything in the other.
  exists = divide_values(division, jnp.ones_like(x))
  return {
    "payload": payload,
    "parts": parts,
    "joined": division.join(parts),
    "whole": whole,
    "joined values": division.join_values(decoded),
    "divided values": divide_values(division, whole),
    "decoded": decoded * exists,
  }


@pytest.mark.parametrize(("codec", "shape"), CASES, ids=repr)
def test_parts_hold_all_that_a_payload_holds(codec, shape):
  x = np.random.default_rng(0).normal(size=shape).astype(np.float32)
  found = run(codec, x)
  like = codec.division(x, WORKERS).like
  part = jax.tree.map(lambda a: a[0], found["parts"])
  assert same_shapes(part, codec.payload_like(like))
  jax.tree.map(np.testing.assert_array_equal, found["joined"], found["payload"])
  # Whoever has a part decodes the elements that the whole payload decodes to.
  np.testing.assert_array_equal(found["joined values"], found["whole"])
  np.testing.assert_array_equal(found["divided values"], found["decoded"])


def test_what_is_not_divided():
  # Payloads whose elements know their place, and empty arrays.
  for codec, shape in (
    (codecs.cast("bfloat16"), (64, 64)),
    (codecs.chain(codecs.rotate(), codecs.uniform(bits=4)), (64, 64)),
    (codecs.random_k(density=0.1), (64, 64)),
    (codecs.sign(), (0, 4)),
    (codecs.topk(density=0.5), (0, 4)),
  ):
    assert codec.division(jnp.zeros(shape), 4) is None
