"""Objects of a store: frozen bytes, and refusals of corrupt and forged ones."""

import hashlib
import json
import pathlib
import struct

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest

from jaxmotion import codecs
from jaxmotion.islands import MessageError, _message
from jaxmotion.islands._outer_step import Contribution, make_outer_step

FROZEN = pathlib.Path(__file__).parent / "objects"
CODECS = {
  "int8": codecs.uniform(bits=8),
  "int4_feedback": codecs.feedback(codecs.uniform(bits=4)),
  "topk": codecs.topk(density=0.25),
  "bfloat16": codecs.cast("bfloat16"),
}
# Numbers that no version of JAX rounds.
PARAMS = {
  "b": jnp.arange(3.0),
  "w": jnp.arange(-6.0, 6.0).reshape(3, 4) / 8,
}


def make_contribution(name):
  """Returns the outer step, what is agreed on, and a contribution's bytes."""
  step = make_outer_step(PARAMS, optax.sgd(1.0), CODECS[name], None)
  anchor = jax.tree.map(np.asarray, PARAMS)
  agreed = step.agree(7, anchor, step.outer.init(anchor))
  moved = jax.tree.map(lambda p: p * 0.5 + 0.25, PARAMS)
  payloads, _, _ = step.encode(agreed, moved, step.init_states(), "a")
  own = Contribution("a", 96, jax.device_get(payloads))
  return step, agreed, step.pack(agreed, own)


@pytest.mark.parametrize("name", CODECS)
def test_bytes_of_a_contribution_are_frozen(name):
  step, agreed, data = make_contribution(name)
  frozen = (FROZEN / f"{name}.contribution").read_bytes()
  assert data == frozen
  own = step.unpack(frozen, agreed, "a")
  assert (own.island, own.tokens) == ("a", 96)
  assert step.pack(agreed, own) == frozen


def test_objects_have_the_layout_that_the_page_describes():
  array = np.array([[1, 2, 3]], ml_dtypes.bfloat16)
  data = _message.pack_message({"kind": "snapshot"}, [array, np.uint32(7)])
  magic, version, length = struct.unpack("<4sHI", data[:10])
  assert (magic, version) == (b"JMIS", 1)
  header = json.loads(data[10 : 10 + length])
  assert header == {
    "kind": "snapshot",
    "arrays": [["bfloat16", [1, 3]], ["uint32", []]],
  }
  body = data[10 + length : -32]
  assert body == array.view(np.uint16).astype("<u2").tobytes() + b"\7\0\0\0"
  assert data[-32:] == hashlib.sha256(data[:-32]).digest()


def forge(data, change):
  """Returns bytes with another header and the SHA-256 of those."""
  length = struct.unpack("<4sHI", data[:10])[2]
  header = json.loads(data[10 : 10 + length])
  change(header)
  text = json.dumps(header).encode()
  body = struct.pack("<4sHI", b"JMIS", 1, len(text)) + text
  body += data[10 + length : -32]
  return body + hashlib.sha256(body).digest()


BAD_SHAPES = (-1, 1 << 62, 0, 2.5, "3", None, True, [], {}, 1e300)
BAD_VALUES = {
  "island": ["b", "../b", "/etc/passwd", "", None, 3, "a/../b"],
  "round": [6, 8, -1, "7", 1 << 80, None, [7]],
  "tokens": [0, -1, float("nan"), float("inf"), "96", None, 1e300, True],
  "anchor": ["", "0" * 64, None, 0],
  "codec": [{}, None, "uniform", {"name": "topk", "density": 1.0}],
  "kind": ["commit", "snapshot", None, 1],
}


def list_forged_headers(rng):
  """Yields functions that change a header to one that must be refused."""
  array, axis = rng.integers(0, 2), rng.integers(0, 4)
  shape = BAD_SHAPES[rng.integers(len(BAD_SHAPES))]

  def change_shape(header):
    shapes = header["arrays"][array % len(header["arrays"])][1]
    shapes[axis % len(shapes) :] = [shape]

  field = [*BAD_VALUES][rng.integers(len(BAD_VALUES))]
  value = BAD_VALUES[field][rng.integers(len(BAD_VALUES[field]))]
  yield change_shape
  yield lambda header: header.update({field: value})
  yield lambda header: header.pop(field)
  yield lambda header: header.update(more=1)
  yield lambda header: header.update(arrays=header["arrays"][1:])
  yield lambda header: header["arrays"][0].__setitem__(0, "float64")


def corrupt(rng, data):
  """Returns other bytes than those of a good object."""
  kind, size = rng.integers(0, 6), len(data)
  if kind == 0:
    return data[: rng.integers(0, size)]
  if kind == 1:
    return data + rng.bytes(int(rng.integers(1, 64)))
  if kind == 2:
    return rng.bytes(int(rng.integers(0, 2 * size)))
  if kind == 3:  # A forged length of the header.
    length = int(rng.integers(0, 1 << 32))
    body = data[:6] + struct.pack("<I", length) + data[10:-32]
    return body + hashlib.sha256(body).digest()
  if kind == 4:
    changes = [*list_forged_headers(rng)]
    return forge(data, changes[rng.integers(len(changes))])
  flipped = bytearray(data)
  for _ in range(rng.integers(1, 4)):
    flipped[rng.integers(0, size)] ^= 1 << rng.integers(0, 8)
  return bytes(flipped)


def test_none_of_10000_corrupt_objects_is_accepted():
  rng = np.random.default_rng(0)
  made = list(map(make_contribution, CODECS))
  accepted = 0
  for i in range(10_000):
    step, agreed, data = made[i % len(made)]
    bad = corrupt(rng, data)
    if bad == data:  # Bits that were flipped back.
      continue
    try:
      step.unpack(bad, agreed, "a")
      accepted += 1
    except MessageError:
      pass
  assert accepted == 0


@pytest.mark.parametrize("bad", [np.nan, np.inf, 1e30])
def test_changes_that_are_not_finite_or_too_large_are_refused(bad):
  step = make_outer_step(PARAMS, optax.sgd(1.0), codecs.identity(), 100.0)
  good = Contribution("a", 1, [jnp.ones(3), jnp.ones((3, 4))])
  payloads, _, _ = step.encode(
    step.agree(0, PARAMS, ()), PARAMS, step.init_states(), "a"
  )
  structure = jax.tree.structure(payloads)
  good = good._replace(payloads=structure.unflatten(good.payloads))
  step.check_change(good)
  leaves = jax.tree.leaves(good.payloads)
  leaves[1] = leaves[1].at[0, 0].set(bad)
  with pytest.raises(MessageError, match="norm|not finite"):
    step.check_change(good._replace(payloads=structure.unflatten(leaves)))
