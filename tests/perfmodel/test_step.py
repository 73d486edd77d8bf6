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
from jaxmotion import codecs, perfmodel
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
PARAMS = [
  {
    "w": jax.ShapeDtypeStruct((a, b), "float32"),
    "b": jax.ShapeDtypeStruct((b,), "float32"),
  }
  for a, b in itertools.pairwise(WIDTHS)
]
BATCH = (
  jax.ShapeDtypeStruct((32, 784), "float32"),
  jax.ShapeDtypeStruct((32, 10), "float32"),
)


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
  place = {
    path: n
    for (path, _), n in zip(
      jax.tree.leaves_with_path(PARAMS), STEP_COST.written, strict=True
    )
  }
  layers = [
    max(n for path, n in place.items() if path[0].idx == i) for i in range(3)
  ]
  assert layers == sorted(layers, reverse=True)
  assert max(STEP_COST.written) <= len(STEP_COST.gradient.kernels)


@pytest.mark.parametrize("name", CODECS)
@pytest.mark.parametrize("bucket_bytes", [None, 1 << 19])
def test_one_worker_has_no_communication(name, bucket_bytes):
  alone = CLUSTER.resize(data=1)
  step = predict_step(
    STEP_COST, alone, "data", CODECS[name], bucket_bytes=bucket_bytes
  )
  assert step.wire_bytes == 0
  if name == "fp32":
    assert step.link_s == 0
    assert step.exposed_s == pytest.approx(0, abs=1e-12)


@pytest.mark.parametrize("name", CODECS)
@pytest.mark.parametrize("bucket_bytes", [None, 1, 1 << 19])
def test_a_step_is_between_its_bounds(name, bucket_bytes):
  def step(overlap):
    return predict_step(
      STEP_COST,
      CLUSTER,
      "data",
      CODECS[name],
      bucket_bytes=bucket_bytes,
      overlap=overlap,
    )

  blocking, overlapped = step(False), step(True)
  parts = (
    blocking.compute_s,
    blocking.encode_s,
    blocking.link_s,
    blocking.decode_s,
    blocking.update_s,
  )
  assert blocking.total_s == pytest.approx(sum(parts))
  assert overlapped.total_s <= blocking.total_s * (1 + 1e-12)
  assert overlapped.total_s >= max(
    overlapped.link_s, sum(parts) - overlapped.link_s
  ) * (1 - 1e-12)
  if bucket_bytes is None:
    # The last gradient may be ready before the last kernel (the loss) ends.
    assert overlapped.total_s == pytest.approx(blocking.total_s, rel=0.01)


def test_buckets_send_the_same_bytes_and_hide_some_of_their_time():
  slow = dataclasses.replace(
    CLUSTER,
    device=dataclasses.replace(
      CLUSTER.device, memory_rate=gbyte_per_s(1), kernel_s=0
    ),
  )
  one, many = (
    predict_step(STEP_COST, slow, "data", bucket_bytes=n)
    for n in (None, 1 << 18)
  )
  assert many.wire_bytes == one.wire_bytes
  assert many.total_s < one.total_s
  # Each bucket has latencies of its own.
  assert many.link_s > one.link_s


def test_rules_see_the_paths_of_every_bucket():
  whole, cut = (
    predict_step(STEP_COST, CLUSTER, "data", CODECS["mixed"], bucket_bytes=n)
    for n in (None, 1)
  )
  assert cut.wire_bytes == whole.wire_bytes


def test_memory_includes_optimizer_and_codec_state():
  size = sum(a * b + b for a, b in itertools.pairwise(WIDTHS))
  assert STEP_COST.state_bytes == 2 * 4 * size + 4
  plain = predict_step(STEP_COST, CLUSTER, "data").memory_bytes
  kept = predict_step(
    STEP_COST, CLUSTER, "data", codecs.feedback(codecs.uniform(bits=8))
  ).memory_bytes
  lossy = predict_step(
    STEP_COST, CLUSTER, "data", codecs.uniform(bits=8)
  ).memory_bytes
  # Parameters, gradients, two moments and the payload that is summed.
  assert plain > 5 * 4 * size
  # Two phases keep error memory of every row, and of the row of the mean.
  assert kept - lossy > 4 * size * 5 / 4


def test_an_update_moves_the_bytes_of_the_optimizer_state():
  sgd = trace_step(loss, PARAMS, BATCH)
  assert sgd.state_bytes == 0
  size = sum(a * b + b for a, b in itertools.pairwise(WIDTHS))
  assert sgd.update.bytes == 3 * 4 * size
  assert STEP_COST.update.bytes > 3 * sgd.update.bytes


DEGRADE = {
  "workers": lambda p, by: p.resize(data=4 * (1 + int(by))),
  "latency": lambda p, by: on_link(p, latency_s=5e-5 * by),
  "rate": lambda p, by: on_link(p, rate=gbit_per_s(1 / by)),
  "shared": lambda p, by: on_link(p, shared_by=1 + int(by)),
  "flops": lambda p, by: on_device(
    p,
    matmul_flops_per_s={"float32": 4e12 / by},
    vector_flops_per_s=4e12 / by,
  ),
  "memory": lambda p, by: on_device(p, memory_rate=gbyte_per_s(50 / by)),
  "kernel": lambda p, by: on_device(p, kernel_s=1e-6 * by),
}


def on_link(platform, **changes):
  (axis,) = platform.axes
  link = dataclasses.replace(axis.link, **changes)
  return dataclasses.replace(
    platform, axes=(dataclasses.replace(axis, link=link),)
  )


def on_device(platform, **changes):
  device = dataclasses.replace(platform.device, **changes)
  return dataclasses.replace(platform, device=device)


@hypothesis.settings(deadline=None, max_examples=40)
@hypothesis.given(
  worse=st.sampled_from(sorted(DEGRADE)),
  by=st.floats(1, 100),
  name=st.sampled_from(["fp32", "int8"]),
  overlap=st.booleans(),
)
def test_no_step_gets_faster_on_a_worse_platform(worse, by, name, overlap):
  def total(platform):
    # One method for all numbers of workers: a free choice may be faster.
    return predict_step(
      STEP_COST,
      platform,
      "data",
      CODECS[name],
      bucket_bytes=1 << 19,
      overlap=overlap,
      method="two_phase",
    ).total_s

  assert total(DEGRADE[worse](CLUSTER, by)) >= total(CLUSTER) * (1 - 1e-12)


def test_the_call_counts_once_a_step():
  called = on_device(CLUSTER, call_s=1e-3)
  before, after = (
    predict_step(STEP_COST, p, "data") for p in (CLUSTER, called)
  )
  assert after.total_s == pytest.approx(before.total_s + 1e-3)
  assert after.exposed_s == pytest.approx(before.exposed_s)


@pytest.mark.parametrize("name", list(CODECS))
def test_a_measured_base_step_scales_all_but_the_exchange(name):
  called = on_device(CLUSTER, call_s=1e-3)
  one = called.resize(data=1)
  assert predict_step(
    STEP_COST, one, "data", base_step_s=0.5
  ).total_s == pytest.approx(0.5)
  codec = CODECS[name]
  plain = predict_step(STEP_COST, called, "data", codec, overlap=False)
  found = predict_step(
    STEP_COST, called, "data", codec, overlap=False, base_step_s=0.5
  )
  base_step_s = plain.compute_s + plain.update_s + plain.call_s
  assert found.total_s == pytest.approx(plain.total_s - base_step_s + 0.5)
  parts = ("compute_s", "update_s", "call_s")
  for part in parts:
    assert getattr(found, part) == pytest.approx(
      getattr(plain, part) * 0.5 / base_step_s
    )
  same = predict_step(STEP_COST, called, "data", codec, base_step_s=base_step_s)
  assert same.total_s == pytest.approx(
    predict_step(STEP_COST, called, "data", codec).total_s
  )


def test_more_examples_take_longer():
  def total(images):
    batch = [
      jax.ShapeDtypeStruct((images, *a.shape[1:]), a.dtype) for a in BATCH
    ]
    return predict_step(
      trace_step(loss, PARAMS, tuple(batch)), CLUSTER, "data"
    ).total_s

  times = [total(n) for n in (1, 8, 64, 512)]
  assert times == sorted(times)


def test_devices_of_a_host_reduce_the_bytes_between_hosts():
  cluster = perfmodel.builtin_platform("h100_cluster").resize(host=4, device=8)
  flat = predict_step(STEP_COST, cluster, "host", codecs.sign())
  axes = jaxmotion.HostAxes("host", "device")
  hierarchical = predict_step(STEP_COST, cluster, axes, codecs.sign())
  ledger = perfmodel.exchange_ledger(PARAMS, cluster, axes, codecs.sign())
  assert hierarchical.wire_bytes == ledger.total_bytes
  assert ledger.per_axis()[("host",)] < flat.wire_bytes / 4


def test_invalid_arguments_are_refused():
  with pytest.raises(TypeError, match="`batch` must be a tuple .* got list"):
    trace_step(loss, PARAMS, list(BATCH))
  with pytest.raises(ValueError, match="`while_trips` must give"):
    trace_step(
      lambda w, x: (
        jax.lax.while_loop(
          lambda c: c.sum() < 9, lambda c: c + 1, jax.lax.stop_gradient(x)
        ).sum()
        + w.sum()
      ),
      PARAMS[0]["w"],
      (BATCH[0],),
    )


SECONDS = st.floats(0, 10, allow_subnormal=False)
MESSAGES = st.lists(st.builds(Message, *[SECONDS] * 4), max_size=8)


def simulate(messages):
  """Returns when the last of tasks ends that wait for others and a resource.

  Each resource works on one task at a time, in the order of the list.
  """
  n = len(messages)
  tasks = []  # (name, resource, seconds, names it waits for)
  for i, m in enumerate(messages):
    tasks.append((("compute", i), "device", m.compute_s, ()))
    tasks.append((("encode", i), "device", m.encode_s, (("compute", i),)))
    tasks.append((("link", i), "link", m.link_s, (("encode", i),)))
  for i in range(n):
    tasks.append(
      (("decode", i), "device", messages[i].decode_s, (("link", i),))
    )
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


@hypothesis.given(MESSAGES)
def test_overlap_is_between_the_longer_resource_and_their_sum(messages):
  overlapped = overlapped_seconds(messages)
  assert overlapped <= blocking_seconds(messages) * (1 + 1e-12)
  device = sum(m.compute_s + m.encode_s + m.decode_s for m in messages)
  link = sum(m.link_s for m in messages)
  assert overlapped >= max(device, link) * (1 - 1e-12)


@hypothesis.given(MESSAGES, st.data(), st.floats(0, 5))
def test_a_longer_phase_never_makes_a_step_shorter(messages, data, more):
  hypothesis.assume(messages)
  i = data.draw(st.integers(0, len(messages) - 1))
  field = data.draw(st.sampled_from(Message._fields))
  slower = list(messages)
  slower[i] = slower[i]._replace(**{field: getattr(slower[i], field) + more})
  for seconds in (blocking_seconds, overlapped_seconds):
    assert seconds(slower) >= seconds(messages) * (1 - 1e-12)


def test_encoding_delays_later_gradients():
  def end(encode):
    return overlapped_seconds([Message(1, encode, 0, 0), Message(1, 0, 5, 0)])

  assert end(2) - end(0) == 2


def test_without_a_link_nothing_overlaps():
  messages = [Message(1, 2, 0, 3), Message(4, 5, 0, 6)]
  assert overlapped_seconds(messages) == blocking_seconds(messages) == 21
  assert overlapped_seconds([]) == blocking_seconds([]) == 0
