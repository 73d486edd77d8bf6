import heapq

import hypothesis
import hypothesis.strategies as st
import pytest

from jaxmotion.perfmodel import Message, blocking_seconds, overlapped_seconds

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
