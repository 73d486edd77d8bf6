"""The ledger's arithmetic, merging and table."""

import pytest

from jaxmotion.wire import Ledger, Move

WORD = Move("all_reduce", ("data",), 4, "uint32", 1024, 1)
SCALE = Move("all_gather", ("host",), 2, "float32", 8, 3)


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
def test_wire_bytes_follow_the_formula(op: str, expected: float) -> None:
  assert Move(op, ("data",), 4, "uint8", 1000, 1).wire_bytes == expected
  assert Move(op, ("data",), 4, "uint8", 1000, 7).wire_bytes == 7 * expected
  assert Move(op, ("data",), 1, "uint8", 1000, 1).wire_bytes == 0


def test_an_unknown_collective_is_refused() -> None:
  with pytest.raises(ValueError, match=r"`op` must be one of .*'gossip'"):
    WORD._replace(op="gossip")
  with pytest.raises(ValueError, match=r"`op` must be one of .*'gossip'"):
    Ledger((WORD,)).select(op="gossip")


def test_equal_moves_are_merged_and_others_are_not() -> None:
  ledger = Ledger((WORD, SCALE, WORD._replace(count=4)))
  assert ledger.moves == (WORD._replace(count=5), SCALE)
  for other in (
    WORD._replace(dtype="int32"),
    WORD._replace(axes=("host",)),
    WORD._replace(workers=2),
    WORD._replace(payload_bytes=1),
  ):
    assert len(Ledger((WORD, other)).moves) == 2


def test_axes_share_out_the_total() -> None:
  both = WORD._replace(axes=("host", "data"), workers=8)
  ledger = Ledger((WORD, SCALE, both))
  assert ledger.per_axis() == {
    ("data",): 1536,
    ("host",): 24,
    ("host", "data"): 1792,
  }
  assert ledger.total_bytes == sum(ledger.per_axis().values())


def test_select_keeps_what_matches_every_field() -> None:
  ledger = Ledger((WORD, SCALE))
  assert ledger.select() == ledger
  assert ledger.select(op="all_gather").moves == (SCALE,)
  assert ledger.select(dtype="uint32").moves == (WORD,)
  assert ledger.select(axes=("host",)).moves == (SCALE,)
  assert ledger.select(op="all_gather", dtype="uint32").moves == ()


def test_no_moves_weigh_nothing() -> None:
  assert Ledger().total_bytes == 0
  assert Ledger().per_axis() == {}


def test_table_is_aligned_and_ends_in_the_total() -> None:
  lines = str(Ledger((WORD, SCALE._replace(axes=())))).splitlines()
  assert len({len(line) for line in lines}) == 1
  assert lines[0].split() == [*Move._fields, "wire_bytes"]
  assert lines[1].split()[1] == "data"
  assert lines[2].split()[1] == "-"
  assert lines[-1].split() == ["total", "1560"]
