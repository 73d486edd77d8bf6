"""Bytes of payloads, and the arithmetic of the ledger."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmotion import codecs, make_key
from jaxmotion.wire import Ledger, Move, payload_bytes

TREE = {
  "dense": {"bias": jnp.ones(5), "kernel": jnp.ones((40, 30))},
  "scale": jnp.ones((), jnp.bfloat16),
  "empty": jnp.zeros((0, 3)),
}
INT4 = codecs.uniform(bits=4, rounding="stochastic", block=64)
TOPK = codecs.topk(density=0.1)
RULES = codecs.rules(
  [("bias|scale", codecs.cast("bfloat16")), (".*", codecs.feedback(INT4))]
)


def test_bytes_are_those_of_the_real_buffers():
  truncated = codecs.buckets(codecs.truncate(bytes=3))
  for codec in (
    RULES,
    codecs.buckets(RULES),
    codecs.buckets(codecs.sign(), max_leaf_size=10),
    codecs.feedback(codecs.buckets(TOPK)),
    codecs.rules([("k", codecs.chain(TOPK, INT4)), ("", truncated)]),
  ):
    encode = lambda key, codec=codec: codec.encode(TREE, codec.init(TREE), key)
    # Which is the size of what is computed: tests of the codecs run it.
    payload, _ = jax.eval_shape(encode, make_key(0))
    real = sum(a.size * a.dtype.itemsize for a in jax.tree.leaves(payload))
    assert payload_bytes(codec, TREE) == real > 0


def test_a_codec_of_arrays_encodes_each_leaf():
  said = payload_bytes(INT4, TREE)
  assert said == sum(payload_bytes(INT4, a) for a in jax.tree.leaves(TREE))
  for codec, width in ((codecs.identity(), 2), (codecs.truncate(bytes=3), 3)):
    assert payload_bytes(codec, jnp.ones(10, jnp.bfloat16)) == 10 * width
  assert payload_bytes(codecs.identity(), {}) == 0


def test_shapes_weigh_what_arrays_do_and_nothing_is_made():
  # 2^40 values would not fit: only shapes are traced.
  huge = jax.ShapeDtypeStruct((1 << 10, 1 << 20), jnp.float32)
  assert payload_bytes(codecs.identity(), huge) == 4 << 30
  shapes = jax.eval_shape(lambda: TREE)
  assert payload_bytes(RULES, shapes) == payload_bytes(RULES, TREE)


@pytest.mark.parametrize("codec", [codecs.identity(), RULES])
def test_a_leaf_that_is_not_floating_point_is_named(codec):
  tree = {"dense": {"bias": jnp.ones(3), "n": np.arange(3, dtype=np.int32)}}
  with pytest.raises(TypeError, match=r"`like/dense/n` must be .*got int32\[3"):
    payload_bytes(codec, tree)


WORD = Move("all_reduce", ("data",), 4, "uint32", 1024, 1)
SCALE = Move("all_gather", ("host",), 2, "float32", 8, 3)
BOTH = WORD._replace(axes=("host", "data"), workers=8)


@pytest.mark.parametrize(
  ("op", "expected"),
  [
    ("all_reduce", 2 * 3 / 4 * 1000),
    ("all_gather", 3 * 1000),
    ("reduce_scatter", 3 / 4 * 1000),
    ("all_to_all", 3 / 4 * 1000),
    ("collective_permute", 1000),
  ],
)
def test_wire_bytes_follow_the_formula(op, expected):
  move = Move(op, ("data",), 4, "uint8", 1000, 1)
  assert move.wire_bytes == expected
  assert move._replace(count=7).wire_bytes == 7 * expected
  assert move._replace(workers=1).wire_bytes == 0


def test_an_unknown_collective_is_refused():
  for call in (WORD._replace, Ledger((WORD,)).select):
    with pytest.raises(ValueError, match=r"`op` must be one of .*'gossip'"):
      call(op="gossip")


def test_equal_moves_are_merged_and_others_are_not():
  ledger = Ledger((WORD, SCALE, WORD._replace(count=4)))
  assert ledger.moves == (WORD._replace(count=5), SCALE)
  for other in (
    dict(dtype="int32"),
    dict(axes=("host",)),
    dict(workers=2),
    dict(payload_bytes=1),
  ):
    assert len(Ledger((WORD, WORD._replace(**other))).moves) == 2


def test_axes_share_out_the_total():
  ledger = Ledger((WORD, SCALE, BOTH))
  totals = {("data",): 1536, ("host",): 24, ("host", "data"): 1792}
  assert ledger.per_axis() == totals
  assert ledger.total_bytes == sum(totals.values())
  assert Ledger().total_bytes == 0 and Ledger().per_axis() == {}


def test_select_keeps_what_matches_every_field():
  ledger = Ledger((WORD, SCALE))
  assert ledger.select() == ledger
  assert ledger.select(op="all_gather").moves == (SCALE,)
  assert ledger.select(dtype="uint32").moves == (WORD,)
  assert ledger.select(axes=("host",)).moves == (SCALE,)
  assert ledger.select(op="all_gather", dtype="uint32").moves == ()


def test_table_is_aligned_and_ends_in_the_total():
  lines = str(Ledger((WORD, SCALE._replace(axes=())))).splitlines()
  assert len({len(line) for line in lines}) == 1
  cells = [line.split() for line in lines]
  assert cells[0] == [*Move._fields, "wire_bytes"]
  assert (cells[1][1], cells[2][1]) == ("data", "-")
  assert cells[-1] == ["total", "1560"]
