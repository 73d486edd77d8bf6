"""The ledger's arithmetic, merging and table."""

import pytest

from jaxmotion.wire import Ledger, Move

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
