import dataclasses
import heapq
import itertools

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import optax
import pytest

import jaxmotion
from jaxmotion import codecs, memory, perfmodel
from jaxmotion.perfmodel import (
  gbit_per_s,
  gbyte_per_s,
  predict_step,
  trace_step,
)
from jaxmotion.perfmodel._step import (
  Message,
  blocking_seconds,
  overlapped_seconds,
)

WIDTHS = (784, 512, 256, 10)


def like(*shape):
  return jax.ShapeDtypeStruct(shape, "float32")


PARAMS = [
  {"w": like(a, b), "b": like(b)} for a, b in itertools.pairwise(WIDTHS)
]
BATCH = (like(32, 784), like(32, 10))


def loss(params, x, y):
  for layer in params:
    x = jax.nn.relu(x @ layer["w"] + layer["b"][None])
  return jnp.mean((x - y) ** 2)


STEP_COST = trace_step(loss, PARAMS, BATCH, optimizer=optax.adam(1e-3))
CLUSTER = perfmodel.builtin_platform("ethernet_1gbit").resize(data=4)
CODECS = {
  "fp32": None,
  "int8": codecs.uniform(bits=8),
  "sign_feedback": codecs.feedback(codecs.sign()),
  "mixed": codecs.rules(
    [("b$", codecs.identity()), ("w", codecs.topk(density=0.01))]
  ),
}


def test_gradients_are_ready_from_the_last_layer_to_the_first():
  places = jax.tree.unflatten(jax.tree.structure(PARAMS), STEP_COST.written)
  layers = [max(layer.values()) for layer in places]
  assert layers == sorted(layers, reverse=True)
  assert max(STEP_COST.written) <= len(STEP_COST.gradient.kernels)


@pytest.mark.parametrize("name", CODECS)
@pytest.mark.parametrize("bucket_bytes", [None, 1, 1 << 19])
def test_a_step_is_between_its_bounds(name, bucket_bytes):
  def step(overlap, platform=CLUSTER):
    options = dict(bucket_bytes=bucket_bytes, overlap=overlap)
    return predict_step(STEP_COST, platform, "data", CODECS[name], **options)

  blocking, overlapped = step(False), step(True)
  names = ("compute_s", "encode_s", "link_s", "decode_s", "update_s")
  parts = [getattr(blocking, name) for name in names]
  assert blocking.total_s == pytest.approx(sum(parts))
  assert overlapped.total_s <= blocking.total_s * (1 + 1e-12)
  assert overlapped.total_s >= max(
    overlapped.link_s, sum(parts) - overlapped.link_s
  ) * (1 - 1e-12)
  if bucket_bytes is None:
    # The last gradient may be ready before the last kernel (the loss) ends.
    assert overlapped.total_s == pytest.approx(blocking.total_s, rel=0.01)
  alone = step(True, CLUSTER.resize(data=1))
  assert alone.wire_bytes == 0
  if name == "fp32":
    assert alone.link_s == 0
    assert alone.exposed_s == pytest.approx(0, abs=1e-12)


def test_buckets_send_the_same_bytes_and_hide_some_of_their_time():
  slow = on_device(CLUSTER, memory_rate=gbyte_per_s(1), kernel_s=0)
  one, many = (
    predict_step(STEP_COST, slow, "data", bucket_bytes=n)
    for n in (None, 1 << 18)
  )
  assert many.wire_bytes == one.wire_bytes
  assert many.total_s < one.total_s
  # Each bucket has latencies of its own.
  assert many.link_s > one.link_s
  # Rules see the paths of every bucket.
  whole, cut = (
    predict_step(STEP_COST, CLUSTER, "data", CODECS["mixed"], bucket_bytes=n)
    for n in (None, 1)
  )
  assert cut.wire_bytes == whole.wire_bytes


def test_memory_includes_optimizer_and_codec_state():
  size = sum(a * b + b for a, b in itertools.pairwise(WIDTHS))
  assert STEP_COST.state_bytes == 2 * 4 * size + 4
  int8 = codecs.uniform(bits=8)
  plain, kept, lossy = (
    predict_step(STEP_COST, CLUSTER, "data", codec).memory_bytes
    for codec in (None, codecs.feedback(int8), int8)
  )
  # Parameters, gradients, two moments and the payload that is summed.
  assert plain > 5 * 4 * size
  # Two phases keep error memory of every row, and of the row of the mean.
  assert kept - lossy > 4 * size * 5 / 4
  # An update moves the optimizer's state.
  sgd = trace_step(loss, PARAMS, BATCH)
  assert sgd.state_bytes == 0 and sgd.update.bytes == 3 * 4 * size
  assert STEP_COST.update.bytes > 3 * sgd.update.bytes


def test_moments_on_the_host_take_no_device_memory():
  tx = memory.adamw_8bit(1e-3, memory_kind="pinned_host")
  # Two numbers of steps stay on the device.
  w = jax.ShapeDtypeStruct((256, 256), "float32")
  cost = trace_step(lambda w, x: jnp.sum(x @ w), w, (w,), optimizer=tx)
  assert cost.state_bytes == 8


def on_device(platform, **changes):
  device = dataclasses.replace(platform.device, **changes)
  return dataclasses.replace(platform, device=device)


@pytest.mark.parametrize("name", ["fp32", "int8"])
def test_no_step_gets_faster_on_a_worse_platform(name):
  (axis,) = CLUSTER.axes
  worse = [
    CLUSTER.resize(data=8),
    on_device(
      CLUSTER, matmul_flops_per_s={"float32": 4e11}, vector_flops_per_s=4e11
    ),
    on_device(CLUSTER, memory_rate=gbyte_per_s(5)),
    on_device(CLUSTER, kernel_s=1e-5),
  ]
  slow = gbit_per_s(0.1)
  for change in ({"latency_s": 5e-4}, {"rate": slow}, {"shared_by": 2}):
    link = dataclasses.replace(axis.link, **change)
    axes = (dataclasses.replace(axis, link=link),)
    worse.append(dataclasses.replace(CLUSTER, axes=axes))
  # One method for all numbers of workers: a free choice may be faster.
  options = dict(bucket_bytes=1 << 19, method="two_phase")
  before, *after = (
    predict_step(STEP_COST, platform, "data", CODECS[name], **options).total_s
    for platform in (CLUSTER, *worse)
  )
  assert min(after) > before


def test_the_call_counts_once_a_step():
  called = on_device(CLUSTER, call_s=1e-3)
  both = CLUSTER, called
  before, after = (predict_step(STEP_COST, p, "data") for p in both)
  assert after.total_s == pytest.approx(before.total_s + 1e-3)
  assert after.exposed_s == pytest.approx(before.exposed_s)


@pytest.mark.parametrize("name", ["fp32", "mixed"])
def test_a_measured_base_step_scales_all_but_the_exchange(name):
  called, codec = on_device(CLUSTER, call_s=1e-3), CODECS[name]

  def step(base_step_s=None, overlap=False, platform=called):
    options = dict(overlap=overlap, base_step_s=base_step_s)
    return predict_step(STEP_COST, platform, "data", codec, **options)

  if codec is None:
    alone = step(0.5, True, called.resize(data=1))
    assert alone.total_s == pytest.approx(0.5)
  plain, found = step(), step(0.5)
  base_step_s = plain.compute_s + plain.update_s + plain.call_s
  assert found.total_s == pytest.approx(plain.total_s - base_step_s + 0.5)
  for part in ("compute_s", "update_s", "call_s"):
    expected = getattr(plain, part) * 0.5 / base_step_s
    assert getattr(found, part) == pytest.approx(expected)
  same = step(base_step_s, True)
  assert same.total_s == pytest.approx(step(overlap=True).total_s)


def test_devices_of_a_host_reduce_the_bytes_between_hosts():
  cluster = perfmodel.builtin_platform("h100_cluster").resize(host=4, device=8)
  flat = predict_step(STEP_COST, cluster, "host", codecs.sign())
  axes = jaxmotion.HostAxes("host", "device")
  hierarchical = predict_step(STEP_COST, cluster, axes, codecs.sign())
  ledger = perfmodel.exchange_ledger(PARAMS, cluster, axes, codecs.sign())
  assert hierarchical.wire_bytes == ledger.total_bytes
  assert ledger.per_axis()[("host",)] < flat.wire_bytes / 4
  sent = {name: ledger.per_axis()[name,] for name in ("host", "device")}
  assert hierarchical.axis_bytes == sent


def test_a_loop_of_an_unknown_length_is_refused():
  def looped(w, x):
    x = jax.lax.stop_gradient(x)
    y = jax.lax.while_loop(lambda c: c.sum() < 9, lambda c: c + 1, x)
    return y.sum() + w.sum()

  with pytest.raises(ValueError, match="`while_trips` must give"):
    trace_step(looped, PARAMS[0]["w"], (BATCH[0],))


SECONDS = st.floats(0, 10, allow_subnormal=False)
MESSAGES = st.lists(st.builds(Message, *[SECONDS] * 4), max_size=8)


def simulate(messages):
  """Returns when the last of tasks ends that wait for others and a resource.

  Each resource works on one task at a time, in the order of the list.
  """
  tasks = []  # (name, resource, seconds, names it waits for)
  for i, m in enumerate(messages):
    tasks.append((("compute", i), "device", m.compute_s, ()))
    tasks.append((("encode", i), "device", m.encode_s, (("compute", i),)))
    tasks.append((("link", i), "link", m.link_s, (("encode", i),)))
  for i, m in enumerate(messages):
    tasks.append((("decode", i), "device", m.decode_s, (("link", i),)))
  queues = {r: [t for t in tasks if t[1] == r] for r in ("device", "link")}
  done, busy, events, clock = set(), set(), [], 0.0
  while any(queues.values()) or events:
    for resource, queue in queues.items():
      if queue and resource not in busy and set(queue[0][3]) <= done:
        name, _, seconds, _ = queue.pop(0)
        busy.add(resource)
        heapq.heappush(events, (clock + seconds, len(done), name, resource))
    clock, _, name, resource = heapq.heappop(events)
    done.add(name)
    busy.discard(resource)
  return clock


@hypothesis.given(MESSAGES)
def test_the_recurrence_equals_an_event_simulation(messages):
  assert overlapped_seconds(messages) == pytest.approx(simulate(messages))


def test_without_a_link_nothing_overlaps():
  messages = [Message(1, 2, 0, 3), Message(4, 5, 0, 6)]
  assert overlapped_seconds(messages) == blocking_seconds(messages) == 21
  assert overlapped_seconds([]) == blocking_seconds([]) == 0
