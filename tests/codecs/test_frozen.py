"""Payloads do not change from version to version: they are on disk.

`python -m tests.codecs.test_frozen` writes the fixture anew. A codec whose
bytes change on purpose says so in the changelog.
"""

import functools
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmotion import make_key
from jaxmotion.testing._laws import Trip, find_in_rows
from jaxmotion.wire import payload_bytes
from tests.codecs.table import ALGORITHMS, CODECS, ULPS

PATH = pathlib.Path(__file__).with_name("frozen.npz")
HOW = "`python -m tests.codecs.test_frozen` adds it"
X = np.random.default_rng(123).normal(size=(37, 29)).astype(np.float32)


@functools.cache
def encode(codec):
  payload, _ = jax.jit(codec.encode)(X, codec.init(X), make_key(11))
  return payload


def decode(codec, payload):
  return np.asarray(jax.jit(lambda p: codec.decode(p, X))(payload))


def as_stored(leaf):
  """Returns plain bytes for dtypes that npz does not know."""
  a = np.asarray(leaf)
  return a if a.dtype.isbuiltin else a.view(np.uint8)


def frozen_leaves():
  if not PATH.exists():
    return {}
  with np.load(PATH) as stored:
    return dict(stored)


FROZEN = frozen_leaves()
ROWS = CODECS | ALGORITHMS
NAMES = pytest.mark.parametrize("name", ROWS)


def stored(name):
  leaves = [v for k, v in FROZEN.items() if k.rpartition("/")[0] == name]
  assert leaves, f"{name} is not in {PATH.name}: {HOW}"
  *payload, y = leaves
  return payload, y


@NAMES
def test_payloads_are_byte_for_byte_the_frozen_ones(name):
  expected, _ = stored(name)
  leaves = [as_stored(a) for a in jax.tree.leaves(encode(ROWS[name]))]
  assert len(leaves) == len(expected)
  for a, b in zip(leaves, expected, strict=True):
    assert a.shape == b.shape and a.dtype == b.dtype
    if name in ULPS and a.dtype == np.float32:
      np.testing.assert_allclose(a, b, atol=ULPS[name] * 2e-7 * np.abs(b).max())
    else:
      assert a.tobytes() == b.tobytes()


@NAMES
def test_frozen_payloads_decode_to_the_frozen_array_within_the_bound(name):
  expected, y = stored(name)
  codec = ROWS[name]
  made = encode(codec)
  leaves = [
    jnp.asarray(b.view(a.dtype).reshape(a.shape))
    for a, b in zip(jax.tree.leaves(made), expected, strict=True)
  ]
  payload = jax.tree.unflatten(jax.tree.structure(made), leaves)
  found = decode(codec, payload)
  if name in ULPS:
    np.testing.assert_allclose(
      found, y, atol=ULPS[name] * 2e-7 * np.abs(y).max()
    )
  else:
    assert found.tobytes() == y.tobytes()
  assert sum(a.nbytes for a in leaves) == payload_bytes(codec, X)
  dropped = np.asarray(codec.count_dropped(payload, X))
  trip = Trip(payload, found[None], dropped[None])
  assert list(find_in_rows(codec, X[None], trip)) == []


def test_the_fixture_holds_no_codec_that_is_gone():
  assert {key.rpartition("/")[0] for key in FROZEN} <= set(ROWS)


def write():
  arrays = {}
  for name, codec in ROWS.items():
    payload = encode(codec)
    leaves = [as_stored(a) for a in jax.tree.leaves(payload)]
    for i, leaf in enumerate([*leaves, decode(codec, payload)]):
      arrays[f"{name}/{i}"] = leaf
  np.savez_compressed(PATH, **arrays)


if __name__ == "__main__":
  write()
