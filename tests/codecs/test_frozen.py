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
from tests.codecs.table import ALGORITHMS, CODECS, ULPS, VARIANTS

PATH = pathlib.Path(__file__).with_name("frozen.npz")
HOW = "`python -m tests.codecs.test_frozen` adds it"
X = np.random.default_rng(123).normal(size=(37, 29)).astype(np.float32)


@functools.partial(jax.jit, static_argnums=0)
def run(codec, x, payload):
  """Returns what a codec makes of an array, and of a payload."""
  made, _ = codec.encode(x, codec.init(x), make_key(11))
  return made, codec.decode(payload, x), codec.count_dropped(payload, x)


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
# Those of variants, whose code other rows run, are compiled last and fast.
NAMES = [name for name in ROWS if name not in VARIANTS]
NAMES += [pytest.param(n, marks=pytest.mark.unoptimized) for n in VARIANTS]


def stored(name):
  leaves = [v for k, v in FROZEN.items() if k.rpartition("/")[0] == name]
  assert leaves, f"{name} is not in {PATH.name}: {HOW}"
  *payload, y = leaves
  return payload, y


def assert_frozen(name, a, b):
  assert a.shape == b.shape and a.dtype == b.dtype
  if name in ULPS and a.dtype == np.float32:
    np.testing.assert_allclose(a, b, atol=ULPS[name] * 2e-7 * np.abs(b).max())
  else:
    assert a.tobytes() == b.tobytes()


@pytest.mark.parametrize("name", NAMES)
def test_payloads_and_what_they_decode_to_are_byte_for_byte_the_frozen(name):
  codec, (frozen, y) = ROWS[name], stored(name)
  likes, treedef = jax.tree.flatten(codec.payload_like(X))
  leaves = [
    jnp.asarray(b.view(a.dtype).reshape(a.shape))
    for a, b in zip(likes, frozen, strict=True)
  ]
  payload = jax.tree.unflatten(treedef, leaves)
  made, found, dropped = jax.tree.map(np.asarray, run(codec, X, payload))
  for a, b in zip(jax.tree.leaves(made), frozen, strict=True):
    assert_frozen(name, as_stored(a), b)
  assert_frozen(name, found, y)
  assert sum(a.nbytes for a in leaves) == payload_bytes(codec, X)
  trip = Trip(payload, found[None], dropped[None])
  assert list(find_in_rows(codec, X[None], trip)) == []


def test_the_fixture_holds_no_codec_that_is_gone():
  assert {key.rpartition("/")[0] for key in FROZEN} <= set(ROWS)


def write():
  arrays = {}
  for name, codec in ROWS.items():
    payload, _ = codec.encode(X, codec.init(X), make_key(11))
    payload, y, _ = run(codec, X, payload)
    leaves = [as_stored(a) for a in jax.tree.leaves(payload)]
    for i, leaf in enumerate([*leaves, np.asarray(y)]):
      arrays[f"{name}/{i}"] = leaf
  np.savez_compressed(PATH, **arrays)


if __name__ == "__main__":
  write()
