"""Measures the link between host and device, and packed weights over it.

  python -m experiments.gpu.transfers --json=transfers.jsonl

Rates are those of arrays in the host's pinned memory, in both directions, and
of numpy's arrays, which are not pinned. Packed weights are encoded on the
host, sent and decoded on the device; times of the three parts are apart, beside
the time of the float32 weights. Where the device is the host, a transfer is a
copy, and rows say `cpu`.
"""

import functools
import statistics
import time
from collections.abc import Callable, Iterator

import jax
import numpy as np
from absl import flags
from jax.sharding import SingleDeviceSharding

from experiments.common import records, shared_flags
from jaxmotion import codecs
from jaxmotion.core import PyTree

_MAX_BYTES = flags.DEFINE_integer(
  "max_bytes", 1 << 28, "Largest array, bytes.", 1024, allow_override=True
)
_REPEATS = shared_flags.define_repeats(7)
_JSON = shared_flags.define_rows()

_CODECS = {
  "truncate_2_bytes": codecs.truncate(bytes=2),
  "truncate_3_bytes": codecs.truncate(bytes=3),
  "bfloat16": codecs.cast("bfloat16"),
  "int8": codecs.uniform(bits=8),
  "int4": codecs.uniform(bits=4),
}
_STEPS = 3  # Sizes are the largest, a sixteenth of it, and so on.


def main() -> None:
  """Measures the link and the packed weights; writes rows."""
  rows = []
  for row in measure_transfers(_MAX_BYTES.value, _REPEATS.value):
    print(f"{row.case} {row.metric}: {row.value:.4g} {row.unit}")
    rows.append(row)
  records.write_rows(_JSON.value, rows)


def measure_transfers(max_bytes: int, repeats: int) -> Iterator[records.Row]:
  """Yields the rates of the link and the times of packed weights."""
  sizes = sorted({max(1024, max_bytes >> 4 * i) for i in range(_STEPS)})
  for size in sizes:
    x = np.random.default_rng(0).normal(size=size // 4).astype(np.float32)
    yield from _measure_rates(x, repeats)
  yield from _measure_packed(x, repeats)


def _measure_rates(x: np.ndarray, repeats: int) -> Iterator[records.Row]:
  """Yields the rates of pinned and other memory, in both directions."""
  device = jax.devices()[0]
  on_device = SingleDeviceSharding(device)
  pinned = SingleDeviceSharding(device, memory_kind="pinned_host")
  there, here = jax.device_put(x, on_device), jax.device_put(x, pinned)
  moves = {
    "pinned_to_device": lambda: jax.device_put(here, on_device),
    "device_to_pinned": lambda: jax.device_put(there, pinned),
    "numpy_to_device": lambda: jax.device_put(x, on_device),
  }
  for name, move in moves.items():
    times = _time_calls(move, repeats)
    rates = [x.nbytes / ms / 1e6 for ms in times]
    case = f"{x.nbytes}_bytes/{name}"
    yield _make_row(case, "bandwidth", rates, "GB/s")


def _measure_packed(x: np.ndarray, repeats: int) -> Iterator[records.Row]:
  """Yields the times of encoding, sending and decoding, by codec."""
  device, host = jax.devices()[0], jax.devices("cpu")[0]
  weights = jax.device_put(x, host)
  like = jax.ShapeDtypeStruct(x.shape, x.dtype)
  plain = _time_calls(lambda: jax.device_put(weights, device), repeats)
  case = f"{x.nbytes}_bytes/float32"
  yield _make_row(case, "transfer", plain, "ms")
  for name, codec in _CODECS.items():
    encode = jax.jit(lambda x, codec=codec: codec.encode(x)[0])
    decode = jax.jit(lambda sent, codec=codec: codec.decode(sent, like))
    payload = encode(weights)
    sent = jax.device_put(payload, device)
    parts = {
      "host_encode": functools.partial(encode, weights),
      "transfer": functools.partial(jax.device_put, payload, device),
      "device_decode": functools.partial(decode, sent),
    }
    for part, call in parts.items():
      times = _time_calls(call, repeats)
      base = statistics.median(plain) if part == "transfer" else None
      yield _make_row(f"{x.nbytes}_bytes/{name}", part, times, "ms", base)


def _make_row(
  case: str,
  metric: str,
  repeats: list[float],
  unit: str,
  baseline: float | None = None,
) -> records.Row:
  noise = records.find_spread(repeats)
  median = records.Measured(statistics.median(repeats), unit, noise)
  return records.make_row("gpu_transfers", case, metric, median, baseline)


def _time_calls(call: Callable[[], PyTree], repeats: int) -> list[float]:
  """Returns the milliseconds of calls, after one that is not counted."""
  jax.block_until_ready(call())
  times = []
  for _ in range(repeats):
    begin = time.perf_counter()
    jax.block_until_ready(call())
    times.append(1e3 * (time.perf_counter() - begin))
  return times


if __name__ == "__main__":
  shared_flags.run_main(main)
