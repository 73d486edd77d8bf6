import dataclasses
import math

import hypothesis
import hypothesis.strategies as st
import jax
import pytest

import jaxmotion
from jaxmotion import perfmodel
from jaxmotion.perfmodel import (
  collective_seconds,
  collective_traffic,
  gbyte_per_s,
)
from jaxmotion.wire import Ledger, Move

LINK = perfmodel.Link(latency_s=1e-5, rate=gbyte_per_s(1))
EVERY = [
  ("all_reduce", "ring"),
  ("all_reduce", "halving_doubling"),
  ("all_reduce", "tree"),
  ("reduce_scatter", "ring"),
  ("reduce_scatter", "halving_doubling"),
  ("all_gather", "ring"),
  ("all_gather", "halving_doubling"),
  ("all_to_all", "ring"),
  ("collective_permute", "ring"),
  ("broadcast", "ring"),
  ("broadcast", "tree"),
]
ON_THE_WIRE = [e for e in EVERY if e[0] != "broadcast" and e[1] != "tree"]


@pytest.mark.parametrize(("op", "algorithm"), EVERY)
def test_one_worker_has_no_communication(op, algorithm):
  assert collective_seconds(op, 1e6, 1, LINK, algorithm=algorithm) == 0


@pytest.mark.parametrize("workers", [1, 2, 8, 1024])
@pytest.mark.parametrize(("op", "algorithm"), ON_THE_WIRE)
def test_bytes_are_those_of_the_ledger(op, algorithm, workers):
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


@pytest.mark.parametrize("workers", [1, 2, 3, 8, 13])
def test_a_ring_takes_the_seconds_of_its_simulated_messages(workers):
  simulated = simulate_ring_all_reduce(1e6 / workers, workers, LINK)
  simulated = simulated if workers > 1 else 0
  predicted = collective_seconds("all_reduce", 1e6, workers, LINK)
  assert predicted == pytest.approx(simulated)


@pytest.mark.parametrize("workers", [1, 2, 8, 64])
def test_halving_doubling_takes_the_seconds_of_its_simulated_messages(workers):
  scatter = simulate_doubling(1e6, workers, LINK, True)
  gather = simulate_doubling(1e6 / workers, workers, LINK, False)
  options = {"algorithm": "halving_doubling"}
  predicted = collective_seconds(
    "reduce_scatter", 1e6, workers, LINK, **options
  )
  assert predicted == pytest.approx(scatter)
  predicted = collective_seconds(
    "all_gather", 1e6 / workers, workers, LINK, **options
  )
  assert predicted == pytest.approx(gather)
  predicted = collective_seconds("all_reduce", 1e6, workers, LINK, **options)
  assert predicted == pytest.approx(scatter + gather)


@pytest.mark.parametrize("workers", [2, 3, 8, 9])
def test_a_tree_takes_the_seconds_of_its_simulated_messages(workers):
  # In each round, every worker that has the data sends it to one other.
  clock, have = 0.0, 1
  while have < workers:
    clock += LINK.transfer_seconds(1e6)
    have *= 2
  options = {"algorithm": "tree"}
  predicted = collective_seconds("broadcast", 1e6, workers, LINK, **options)
  assert predicted == pytest.approx(clock)
  predicted = collective_seconds("all_reduce", 1e6, workers, LINK, **options)
  assert predicted == pytest.approx(2 * clock)


POSITIVE = st.floats(1.0, 1e9)


@hypothesis.given(
  which=st.sampled_from(EVERY),
  nbytes=POSITIVE,
  doublings=st.integers(0, 16),
  latency=st.floats(0, 1e-2),
  rate=st.floats(1e-3, 100),
  more=st.floats(1, 10),
  parameter=st.sampled_from(
    ("bytes", "workers", "latency", "rate", "shared", "efficiency")
  ),
)
def test_no_collective_gets_faster_on_a_worse_link(
  which, nbytes, doublings, latency, rate, more, parameter
):
  op, algorithm = which
  workers = 1 << doublings
  link = perfmodel.Link(latency_s=latency, rate=gbyte_per_s(rate))
  before = collective_seconds(op, nbytes, workers, link, algorithm=algorithm)
  worse = {
    "latency": {"latency_s": min(latency * more + 1e-6, 1)},
    "rate": {"rate": gbyte_per_s(rate / more)},
    "shared": {"shared_by": 3},
    "efficiency": {"efficiency": {op: 1 / more}},
  }.get(parameter, {})
  link = dataclasses.replace(link, **worse)
  nbytes *= more if parameter == "bytes" else 1
  workers *= 2 if parameter == "workers" else 1
  after = collective_seconds(op, nbytes, workers, link, algorithm=algorithm)
  assert after >= before * (1 - 1e-12)


@pytest.mark.parametrize("op", ["all_reduce", "broadcast"])
@pytest.mark.parametrize("algorithm", ["ring", "tree"])
def test_a_ring_and_a_tree_grow_with_every_worker(op, algorithm):
  times = [
    collective_seconds(op, 1e6, n, LINK, algorithm=algorithm)
    for n in range(1, 70)
  ]
  assert times == sorted(times)


def test_invalid_arguments_are_refused():
  with pytest.raises(ValueError, match=r"power of two .*, got 6"):
    collective_traffic("all_reduce", 1, 6, algorithm="halving_doubling")
  with pytest.raises(
    ValueError, match="`algorithm` must be one of 'ring', got"
  ):
    collective_traffic("all_to_all", 1, 6, algorithm="tree")


CLUSTER = perfmodel.builtin_platform("h100_cluster").resize(host=4, device=8)


def test_a_ledger_takes_the_seconds_of_its_moves():
  move = Move("all_gather", ("host",), 4, "uint32", 10**6, 3)
  link = CLUSTER.axis("host").link
  one = collective_seconds("all_gather", 10**6, 4, link)
  both = Ledger((move, Move("all_reduce", ("device",), 8, "f", 0, 1)))
  latency = 14 * CLUSTER.axis("device").link.latency_s
  predicted = perfmodel.ledger_seconds(both, CLUSTER)
  assert predicted == pytest.approx(3 * one + latency)


def test_a_move_over_two_axes_takes_the_seconds_of_the_slower_link():
  joint = Ledger((Move("all_reduce", ("host", "device"), 32, "f", 10**9, 1),))
  host = CLUSTER.axis("host").link
  predicted = perfmodel.ledger_seconds(joint, CLUSTER)
  assert predicted == collective_seconds("all_reduce", 10**9, 32, host)
  alone = CLUSTER.resize(host=1)
  joint = Ledger((Move("all_reduce", ("host", "device"), 8, "f", 10**9, 1),))
  device = CLUSTER.axis("device").link
  predicted = perfmodel.ledger_seconds(joint, alone)
  assert predicted == collective_seconds("all_reduce", 10**9, 8, device)


def test_a_ring_over_two_axes_uses_a_shared_link_once():
  host, device = CLUSTER.axes
  shared = dataclasses.replace(host.link, shared_by=8)
  crowded = dataclasses.replace(
    CLUSTER, axes=(dataclasses.replace(host, link=shared), device)
  )
  for op, ratio in (("all_reduce", 1), ("all_to_all", 8)):
    joint = Ledger((Move(op, ("host", "device"), 32, "f", 10**12, 1),))
    slower = perfmodel.ledger_seconds(joint, crowded)
    assert slower / perfmodel.ledger_seconds(joint, CLUSTER) == pytest.approx(
      ratio, rel=1e-3
    )


def test_a_ledger_of_another_mesh_is_refused():
  move = Move("all_gather", ("host",), 5, "uint32", 10, 1)
  with pytest.raises(ValueError, match=r"must have 5 workers.*resize"):
    perfmodel.ledger_seconds(Ledger((move,)), CLUSTER)


@pytest.mark.parametrize("sizes", [(4, 8), (1, 8), (4, 1), (1, 1)])
def test_a_hierarchical_exchange_sends_a_part_over_the_outer_axis(sizes):
  host, device = sizes
  cluster = CLUSTER.resize(host=host, device=device)
  grads = jax.ShapeDtypeStruct((2 * 10**6,), "float32")
  axes = jaxmotion.HostAxes("host", "device")
  ledger = perfmodel.exchange_ledger(grads, cluster, axes)
  local = 2 * (device - 1) / device * 8e6
  between = 2 * (host - 1) / host * 8e6 / device
  per_axis = ledger.per_axis()
  assert per_axis.get(("device",), 0) == pytest.approx(local)
  assert per_axis[("host",)] == pytest.approx(between)
  assert math.isclose(ledger.total_bytes, local + between)
