import dataclasses

import pytest

from jaxmotion import perfmodel
from jaxmotion.perfmodel import (
  _collectives,
  collective_seconds,
  collective_traffic,
  gbyte_per_s,
)
from jaxmotion.wire import Ledger, Move

LINK = perfmodel.Link(latency_s=1e-5, rate=gbyte_per_s(1))


@pytest.mark.parametrize(("op", "algorithm"), sorted(_collectives._TRAFFIC))
def test_bytes_are_those_of_the_ledger_and_one_worker_has_none(op, algorithm):
  assert seconds(op, 1e6, 1, algorithm) == 0
  if op == "broadcast" or algorithm == "tree":
    return  # The ledger has neither.
  for workers in (1, 2, 8, 1024):
    predicted = collective_traffic(op, 12_345, workers, algorithm=algorithm)
    move = Move(op, ("data",), workers, "uint8", 12_345, 1)
    assert predicted.wire_bytes == move.wire_bytes


def simulate_ring_all_reduce(chunk_bytes, workers, link):
  """Returns when the last message of a ring arrives, one message at a time."""
  arrived = [0.0] * workers  # when a worker may send its next chunk
  free = [0.0] * workers  # when its link is free
  for _ in range(2 * (workers - 1)):
    begin = [max(a, b) for a, b in zip(arrived, free, strict=True)]
    busy = chunk_bytes / link.rate.bytes_per_s
    free = [t + busy for t in begin]
    arrived = [begin[w - 1] + busy + link.latency_s for w in range(workers)]
  return max(arrived)


def simulate_doubling(nbytes, workers, link, halve):
  """Returns the seconds of exchanges with partners 1, 2, 4... away."""
  clock, distance = 0.0, 1
  while distance < workers:
    part = nbytes / (2 * distance) if halve else nbytes * distance
    clock += link.latency_s + part / link.rate.bytes_per_s
    distance *= 2
  return clock


def seconds(op, payload_bytes, workers, algorithm):
  return collective_seconds(
    op, payload_bytes, workers, LINK, algorithm=algorithm
  )


@pytest.mark.parametrize("workers", [2, 3, 8, 9, 13])
def test_rings_and_trees_take_the_seconds_of_their_messages(workers):
  simulated = simulate_ring_all_reduce(1e6 / workers, workers, LINK)
  found = seconds("all_reduce", 1e6, workers, "ring")
  assert found == pytest.approx(simulated)
  # In each round, every worker that has the data sends it to one other.
  clock, have = 0.0, 1
  while have < workers:
    clock += LINK.transfer_seconds(1e6)
    have *= 2
  for op, passes in (("broadcast", 1), ("all_reduce", 2)):
    assert seconds(op, 1e6, workers, "tree") == pytest.approx(passes * clock)


@pytest.mark.parametrize("workers", [1, 2, 8, 64])
def test_halving_doubling_takes_the_seconds_of_its_messages(workers):
  scatter = simulate_doubling(1e6, workers, LINK, True)
  gather = simulate_doubling(1e6 / workers, workers, LINK, False)
  found = [
    seconds(op, nbytes, workers, "halving_doubling")
    for op, nbytes in (
      ("reduce_scatter", 1e6),
      ("all_gather", 1e6 / workers),
      ("all_reduce", 1e6),
    )
  ]
  assert found == pytest.approx([scatter, gather, scatter + gather])
  with pytest.raises(ValueError, match=r"power of two .*, got 6"):
    seconds("all_reduce", 1e6, 6, "halving_doubling")
  with pytest.raises(ValueError, match="`algorithm` must be one of 'ring'"):
    seconds("all_to_all", 1e6, 6, "tree")


def test_workers_that_share_a_link_and_inefficient_collectives_take_longer():
  link = dataclasses.replace(LINK, shared_by=3, efficiency={"all_reduce": 0.5})
  found = collective_seconds("all_reduce", 1e6, 4, link)
  assert found == pytest.approx(6 * 1e-5 + 1.5e6 * 3 / 0.5 / 1e9)
  found = collective_seconds("all_gather", 1e6, 4, link)
  assert found == pytest.approx(3 * 1e-5 + 3e6 * 3 / 1e9)
  assert link.transfer_seconds(1e6) == pytest.approx(1e-5 + 3e6 / 1e9)


CLUSTER = perfmodel.builtin_platform("h100_cluster").resize(host=4, device=8)


def predict_move(op, axes, workers, nbytes, cluster=CLUSTER):
  move = Move(op, axes, workers, "float", nbytes, 1)
  return perfmodel.ledger_seconds(Ledger((move,)), cluster)


def test_a_ledger_takes_the_seconds_of_its_moves():
  move = Move("all_gather", ("host",), 4, "uint32", 10**6, 3)
  link = CLUSTER.axis("host").link
  one = collective_seconds("all_gather", 10**6, 4, link)
  both = Ledger((move, Move("all_reduce", ("device",), 8, "f", 0, 1)))
  latency = 14 * CLUSTER.axis("device").link.latency_s
  predicted = perfmodel.ledger_seconds(both, CLUSTER)
  assert predicted == pytest.approx(3 * one + latency)
  with pytest.raises(ValueError, match=r"must have 5 workers.*resize"):
    predict_move("all_gather", ("host",), 5, 10)


def test_a_move_over_two_axes_takes_the_slower_link_and_shared_ones_once():
  axes = ("host", "device")
  for cluster, workers, name in (
    (CLUSTER, 32, "host"),
    (CLUSTER.resize(host=1), 8, "device"),
  ):
    link = cluster.axis(name).link
    assert predict_move(
      "all_reduce", axes, workers, 10**9, cluster
    ) == collective_seconds("all_reduce", 10**9, workers, link)
  host, device = CLUSTER.axes
  shared = dataclasses.replace(host.link, shared_by=8)
  axes = (dataclasses.replace(host, link=shared), device)
  crowded = dataclasses.replace(CLUSTER, axes=axes)
  for op, ratio in (("all_reduce", 1), ("all_to_all", 8)):
    slower, before = (
      predict_move(op, ("host", "device"), 32, 10**12, platform)
      for platform in (crowded, CLUSTER)
    )
    assert slower / before == pytest.approx(ratio, rel=1e-3)
