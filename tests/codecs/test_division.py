"""Parts of payloads, each of which one worker averages."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmotion import codecs
from jaxmotion.codecs._division import divide_axis, join_axis
from jaxmotion.core import same_shapes

CODECS = pytest.mark.parametrize(
  "codec",
  [
    codecs.uniform(bits=8, block=64),
    codecs.uniform(bits=3, block=64),
    codecs.uniform(bits=4, block=64, symmetric=False),
    codecs.sign(block=64),
    codecs.ternary(rounding="threshold", block=64),
    codecs.topk(density=0.01),
    codecs.topk(density=0.1, block=64),
    codecs.feedback(codecs.sign(block=64)),
    codecs.momentum_correction(codecs.feedback(codecs.topk(density=0.01))),
  ],
  ids=repr,
)
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


@pytest.mark.parametrize("shape", [(512, 96), (20011,)])
@CODECS
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


@pytest.mark.parametrize(
  "codec",
  [
    codecs.cast("bfloat16"),
    codecs.chain(codecs.rotate(), codecs.uniform(bits=4)),
    codecs.random_k(density=0.1),
  ],
  ids=repr,
)
def test_payloads_whose_elements_know_their_place_are_not_divided(codec):
  assert codec.division(jnp.zeros((64, 64)), 4) is None


@pytest.mark.parametrize("codec", [codecs.sign(), codecs.topk(density=0.5)])
def test_an_empty_array_is_not_divided(codec):
  assert codec.division(jnp.zeros((0, 4)), 2) is None


@pytest.mark.parametrize(("length", "workers"), [(7, 3), (6, 3), (2, 4)])
def test_an_axis_is_cut_and_joined(length, workers):
  a = jnp.arange(2 * length * 3).reshape(2, length, 3)
  each = -(-length // workers)
  parts = divide_axis(a, 1, workers, each)
  assert parts.shape == (workers, 2, each, 3)
  np.testing.assert_array_equal(join_axis(parts, 1, length), a)
