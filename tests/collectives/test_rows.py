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


@pytest.mark.parametrize(
  ("name", "shape", "workers"),
  # Rows that workers divide and do not, a vector, and more rows of padding
  # than one worker has.
  [
    ("stochastic", (512, 256), 4),
    ("stochastic", (512, 256), 3),
    ("stochastic", (300, 257), 64),
    ("int8", (131_101,), 4),
    ("sign", (512, 256), 3),
    ("bfloat16", (131_101,), 4),
  ],
)
def test_shards_have_the_bits_of_padded_rows(name, shape, workers):
  codec = CODECS[name]
  key = make_key(3) if codec.needs_key else None
  x = np.random.default_rng(1).normal(size=shape).astype(np.float32)

  @jax.jit
  def encode(x):
    rows = _layout.pad_to_rows(x, workers)
    padded = _layout.encode_rows(codec, rows, (), key)[0]
    return _layout.encode_shards(codec, x, workers, (), key)[0], padded

  jax.tree.map(np.testing.assert_array_equal, *encode(x))


def test_shards_of_a_codec_with_memory_remember_what_padded_rows_do():
  codec = codecs.feedback(codecs.uniform(bits=4))
  x = np.random.default_rng(1).normal(size=(512, 256)).astype(np.float32)

  @jax.jit
  def encode(x):
    rows = _layout.pad_to_rows(x, 3)
    state = jax.vmap(codec.init)(rows)
    padded = _layout.encode_rows(codec, rows, state, None)
    return _layout.encode_shards(codec, x, 3, state, None), padded

  jax.tree.map(np.testing.assert_array_equal, *encode(x))
