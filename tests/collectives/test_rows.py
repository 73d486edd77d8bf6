"""Rows of an array, one for each worker, that are encoded one by one."""

import jax
import numpy as np
import pytest

from jaxmotion import codecs, make_key
from jaxmotion.collectives import _layout

CODECS = {
  "int8": codecs.uniform(bits=8),
  "stochastic": codecs.uniform(bits=4, rounding="stochastic"),
  "sign": codecs.sign(),
  "bfloat16": codecs.cast("bfloat16"),
}


@pytest.mark.parametrize("name", CODECS)
@pytest.mark.parametrize(
  ("shape", "workers"),
  # Rows that workers divide and do not, a vector, and more rows of padding
  # than one worker has.
  [((512, 256), 4), ((512, 256), 3), ((131_101,), 4), ((300, 257), 64)],
)
def test_shards_have_the_bits_of_padded_rows(name, shape, workers):
  codec = CODECS[name]
  key = make_key(3) if codec.needs_key else None
  x = np.random.default_rng(1).normal(size=shape).astype(np.float32)

  def encode_padded(x):
    rows = _layout.pad_to_rows(x, workers)
    return _layout.encode_rows(codec, rows, (), key)[0]

  def encode(x):
    return _layout.encode_shards(codec, x, workers, (), key)[0]

  found, expected = jax.jit(encode)(x), jax.jit(encode_padded)(x)
  jax.tree.map(np.testing.assert_array_equal, found, expected)


def test_shards_of_a_codec_with_memory_remember_what_padded_rows_do():
  codec = codecs.feedback(codecs.uniform(bits=4))
  x = np.random.default_rng(1).normal(size=(512, 256)).astype(np.float32)
  rows = _layout.pad_to_rows(x, 3)
  state = jax.vmap(codec.init)(rows)
  found = _layout.encode_shards(codec, x, 3, state, None)
  expected = _layout.encode_rows(codec, rows, state, None)
  jax.tree.map(np.testing.assert_array_equal, found, expected)
