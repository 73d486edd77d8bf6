"""Measurement of the link of two processes, by which their step sends."""

import time

import jax
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding

from jaxmotion.hosts import _sender

# Bytes of the messages that are timed. A router's buffer may take some 100 KB
# of the medium one at once, so the long one follows unless the link is slow.
_SHORT, _MEDIUM, _LONG = 4, 1 << 18, 1 << 21
_SLOW = 8
# The first messages open connections and widen TCP's windows.
_WARM_UP, _REPEATS = 2, 4
# Shortest difference of two times, in seconds, that is no noise.
_LEAST = 1e-4
# So few bytes are gathered otherwise, in one round trip, too. Gathers take one
# queue. On busy cores a step with swaps in two queues took up to 4 ms longer.
_GATHERED = 1 << 18


def measure_swap_bytes(mesh: Mesh, sender: _sender.Sender) -> float:
  """Returns up to how many bytes two workers swap faster than they add."""
  # It is what the link carries in two round trips. A sum takes two of them, and
  # uses the link in both directions at once. A swap takes one, and sends first
  # in one direction and then in the other. A link that carries 256 KiB at most
  # has fast round trips, and no message is swapped.
  if mesh.size != 2 or jax.process_count() != 2:
    return 0.0
  axes = tuple(mesh.axis_names)
  rows = NamedSharding(mesh, jax.P(axes))

  @jax.jit
  @jax.shard_map(mesh=mesh, in_specs=jax.P(axes), out_specs=jax.P())
  def add(own: jax.Array) -> jax.Array:
    return lax.psum(own, axes)

  def add_up(values: np.ndarray) -> np.ndarray:
    own = jax.make_array_from_process_local_data(rows, values)
    total = jax.block_until_ready(sender.send(add, own))
    return np.asarray(total.addressable_data(0))

  def time_sum(nbytes: int) -> float:
    words, times = np.zeros(nbytes // 4, np.float32), []
    for _ in range(_WARM_UP + _REPEATS):
      begin = time.perf_counter()
      add_up(words)
      times.append(time.perf_counter() - begin)
    least = np.array([min(times[_WARM_UP:])], np.float32)
    # The mean of both processes: if they chose differently, they would wait for
    # each other.
    return float(add_up(least)[0]) / 2

  # One element is sent whole, in one round trip.
  round_trip, sent = time_sum(_SHORT), _MEDIUM
  sending = time_sum(sent) - 2 * round_trip
  if sending < _SLOW * round_trip:
    sent = _LONG
    sending = time_sum(sent) - 2 * round_trip
  swapped = 2 * round_trip * sent / max(sending, _LEAST)
  return swapped if swapped > _GATHERED else 0.0
