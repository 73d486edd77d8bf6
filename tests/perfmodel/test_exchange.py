"""Predicted exchanges send the bytes of the traced exchange."""

import dataclasses

import jax
import pytest
from jax.sharding import AbstractMesh, AxisType, PartitionSpec as P

from jaxmotion import HostAxes, codecs, collectives, make_key, perfmodel, wire
from jaxmotion.collectives.extend import part_like
from jaxmotion.perfmodel import exchange_ledger, predict_exchange
from jaxmotion.perfmodel.extend import decode_seconds, encode_seconds
from tests.codecs.table import CODECS, KINDS

TREE = {
  "matrix": jax.ShapeDtypeStruct((96, 40), "float32"),
  "odd": jax.ShapeDtypeStruct((37, 29), "float32"),
  "bias": jax.ShapeDtypeStruct((5,), "float32"),
  "half": jax.ShapeDtypeStruct((64, 33), "bfloat16"),
  "scale": jax.ShapeDtypeStruct((), "float32"),
}
MIXED = codecs.rules(
  [
    ("bias|scale", codecs.identity()),
    ("half", codecs.cast("float8_e4m3fn")),
    ("odd", codecs.feedback(codecs.topk(density=0.1))),
    (".*", codecs.uniform(bits=4)),
  ]
)
LINK = perfmodel.Link(latency_s=1e-5, rate=perfmodel.gbit_per_s(10))


def platform(**workers):
  axes = tuple(
    perfmodel.Axis(name=name, workers=n, link=LINK)
    for name, n in workers.items()
  )
  base = perfmodel.builtin_platform("ethernet_10gbit")
  return dataclasses.replace(base, axes=axes, sources={})


def traced_ledger(body, **workers):
  mesh = AbstractMesh(
    tuple(workers.values()),
    tuple(workers),
    axis_types=(AxisType.Auto,) * len(workers),
  )
  program = jax.shard_map(
    lambda: body(
      jax.tree.map(lambda a: jax.numpy.zeros(a.shape, a.dtype), TREE)
    ),
    mesh=mesh,
    in_specs=(),
    out_specs=P(),
  )
  return wire.step_bytes(program)


def all_reduce_body(codec, method):
  def body(x):
    options = dict(method=method)
    state = collectives.all_reduce_init(x, "data", codec, **options)
    return collectives.all_reduce(
      x, "data", codec, state=state, key=make_key(0, 1), **options
    )[0]

  return body


def payload_by_op(ledger):
  """Returns payload bytes by collective.

  Between two workers a gather, and a swap of half of the payload, may be a sum
  of words: all three count as gathers of what is sent.
  """
  totals = {}
  for move in ledger.moves:
    op, nbytes = move.op, move.payload_bytes * move.count
    if op == "all_reduce" and move.workers == 2 and "int" in move.dtype:
      op = "all_gather"
    if op == "all_to_all" and move.workers == 2:
      op, nbytes = "all_gather", nbytes / 2
    if move.wire_bytes:
      totals[op] = totals.get(op, 0) + nbytes
  return totals


TRACED = {
  "identity": codecs.identity(),
  "sign": codecs.sign(),
  "random_k": codecs.random_k(density=0.3),
  "buckets": codecs.buckets(codecs.uniform(bits=8)),
  "mixed": MIXED,
  "low_rank": codecs.rules(
    [
      ("matrix|odd", codecs.feedback(codecs.low_rank(rank=3))),
      ("half", codecs.uniform(bits=8)),
      (".*", codecs.identity()),
    ]
  ),
}


# Every number of workers and method with the codec that has all kinds of
# payloads; each other codec where its own rule decides.
@pytest.mark.parametrize(
  ("name", "workers", "method"),
  [
    ("mixed", 1, None),
    ("mixed", 2, None),
    ("mixed", 2, "two_phase"),
    ("mixed", 8, None),
    ("mixed", 8, "gather"),
    ("identity", 8, "gather"),
    ("sign", 8, None),
    ("random_k", 8, None),
    ("buckets", 2, "two_phase"),
    ("low_rank", 4, None),
  ],
)
def test_bytes_are_those_of_the_traced_exchange(name, workers, method):
  codec = TRACED[name]
  cluster = platform(data=workers)
  predicted = exchange_ledger(TREE, cluster, "data", codec, method=method)
  traced = traced_ledger(all_reduce_body(codec, method), data=workers)
  assert predicted.total_bytes == traced.total_bytes
  assert payload_by_op(predicted) == payload_by_op(traced)


@pytest.mark.parametrize("name", KINDS)
def test_bytes_are_right_for_every_codec(name):
  codec = CODECS[name]
  # More elements than one block, and a multiple of no block.
  x = jax.ShapeDtypeStruct((2 * 647,), "float32")
  payload = wire.payload_bytes(codec, x)
  for workers in (2, 5):
    predicted = exchange_ledger(x, platform(data=workers), "data", codec)
    if codec.summable:
      # The seed of random_k, 4 bytes, is not summed.
      seed = 4 if name.startswith("random_k") else 0
      expected = 2 * (workers - 1) / workers * (payload - seed)
    elif workers == 2:
      expected = payload
    else:
      part = part_like(codec, x, workers)
      expected = 2 * (workers - 1) * wire.payload_bytes(codec, part)
    assert predicted.total_bytes == pytest.approx(expected, abs=1e-9)


@pytest.mark.parametrize(
  ("name", "hosts", "devices"),
  [
    ("mixed", 2, 4),
    ("mixed", 4, 1),
    ("mixed", 1, 3),
    ("sign", 3, 2),
    (None, 2, 4),
  ],
)
def test_bytes_of_hosts_of_devices_are_those_of_the_trace(name, hosts, devices):
  codec, axes = TRACED.get(name), HostAxes("host", "device")

  def body(x):
    kind = codec or codecs.identity()
    state = collectives.all_reduce_init(x, axes, kind)
    return collectives.all_reduce(
      x, axes, codec, state=state, key=make_key(0, 1)
    )[0]

  cluster = platform(host=hosts, device=devices)
  predicted = predict_exchange(TREE, cluster, axes, codec).ledger
  assert predicted == exchange_ledger(TREE, cluster, axes, codec)
  traced = traced_ledger(body, host=hosts, device=devices)
  assert predicted.per_axis() == {
    axis: n
    for axis, n in traced.per_axis().items()
    if n or axis in predicted.per_axis()
  }
  assert predicted.total_bytes == traced.total_bytes


GRADS = jax.ShapeDtypeStruct((2048, 512), "float32")


def test_one_worker_sends_nothing_and_full_precision_takes_the_link_alone():
  for codec in (None, codecs.sign()):
    alone = predict_exchange(TREE, platform(data=1), "data", codec)
    assert alone.link_s == alone.ledger.total_bytes == 0
  plain = predict_exchange(GRADS, platform(data=8), "data")
  assert plain.total_s == plain.link_s
  predicted = perfmodel.collective_seconds("all_reduce", 2**22, 8, LINK)
  assert plain.link_s == predicted


def test_two_phases_encode_twice_and_gathers_decode_all_payloads():
  int8 = codecs.uniform(bits=8)
  cluster = platform(data=8)
  gather = predict_exchange(GRADS, cluster, "data", int8, method="gather")
  two = predict_exchange(GRADS, cluster, "data", int8, method="two_phase")
  assert gather.recode_s == 0 < two.recode_s
  assert gather.encode_s == two.encode_s
  assert gather.decode_s > two.decode_s
  assert gather.link_s > 3 * two.link_s


def test_a_codec_takes_about_what_its_own_trace_says():
  device = platform(data=8).device
  x = jax.ShapeDtypeStruct((4096, 512), "float32")

  def own_seconds(fn, arg):
    own = perfmodel.predict_cost(fn, arg)
    return pytest.approx(perfmodel.predict_seconds(own, device), rel=0.1)

  for codec in (codecs.uniform(bits=8), codecs.sign(), codecs.cast("bfloat16")):
    expected = own_seconds(lambda x, c=codec: c.encode(x), x)
    assert encode_seconds(codec, x.size, device) == expected
    payload = codec.payload_like(x)
    expected = own_seconds(lambda p, c=codec: c.decode(p, x), payload)
    assert decode_seconds(codec, x.size, 1, device) == expected
