"""Timing and rows of awkward shapes beside friendly ones of as many values."""

import functools
from collections.abc import Collection, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import rich.progress

from experiments.codecs import run, shape_cases, tables
from experiments.common import records, timing
from jaxmotion import codecs, collectives, core, make_key

METRICS = ("encode", "update", "exchange")
"""What is timed of each shape with each codec."""

_AXIS = "data"
# Workers whose payloads an update averages.
_SENDERS = 2
# Emulated devices may hang if more calls are under way.
_IN_FLIGHT = 16


class Result(NamedTuple):
  """One measured ratio of times."""

  case: str  # Name of the shape, a slash, name of the codec.
  metric: str  # One of `METRICS`.
  # Median of the ratio to the friendly shape in the same repeat, both per value
  # and worker.
  value: float
  noise: float  # Sample standard deviation of the ratio.
  # Median time of the friendly shape, nanoseconds per value and worker.
  baseline: float


def measure_shapes(
  names: Sequence[str],
  codec_names: Sequence[str],
  metrics: Sequence[str],
  repeats: int,
  done: Collection[tuple[str, str]] = (),
) -> Iterator[Result]:
  """Yields each shape's time beside the friendly shape of as many values."""
  work = [
    (metric, codec, friendly, name)
    for metric, codec, friendly, name in _list_work(names, codec_names, metrics)
    if (f"{name}/{codec}", metric) not in done
  ]
  time_friendly = functools.lru_cache(maxsize=1)(_time_shape)
  for metric, codec, friendly, name in rich.progress.track(work):
    awkward = shape_cases.AWKWARD[name]
    cases = {
      "friendly": time_friendly(metric, codec, friendly),
      name: _time_shape(metric, codec, awkward),
    }
    times = timing.measure_times(cases, repeats)
    ratio, noise = times.ratio("friendly", name)
    share = _count_work(metric, friendly) / _count_work(metric, awkward)
    yield Result(
      f"{name}/{codec}",
      metric,
      ratio * share,
      noise * share,
      1e6 * times.median("friendly") / _count_work(metric, friendly),
    )


def time_exchange(
  codec: codecs.Codec, shapes: Sequence[tuple[int, ...]], workers: int
) -> timing.TimedCalls:
  """Returns SGD updates with the mean of gradients of emulated workers."""
  mesh = jax.sharding.Mesh(np.array(jax.devices()[:workers]), (_AXIS,))
  # Outer dimension: the gradients of all workers.
  likes = [jax.ShapeDtypeStruct((workers, *s), jnp.float32) for s in shapes]

  @functools.partial(
    jax.shard_map, mesh=mesh, in_specs=(), out_specs=jax.P(_AXIS)
  )
  def make_state() -> Any:
    own = [jax.ShapeDtypeStruct(s, jnp.float32) for s in shapes]
    state = collectives.all_reduce_init(own, _AXIS, codec)
    return core.pack_worker(state)

  @functools.partial(
    jax.shard_map,
    mesh=mesh,
    in_specs=((jax.P(), jax.P(_AXIS)), jax.P(_AXIS)),
    out_specs=(jax.P(), jax.P(_AXIS)),
  )
  def step(last: Any, grads: Any) -> Any:
    params, state = last
    mean, state = collectives.all_reduce(
      [g[0] for g in grads],
      _AXIS,
      codec,
      state=core.unpack_worker(state),
      key=make_key(0),
    )
    update = lambda p, m: p - 0.1 * m
    return jax.tree.map(update, params, mean), core.pack_worker(state)

  def place(tree: Any, spec: Any) -> Any:
    sharding = jax.sharding.NamedSharding(mesh, spec)
    return jax.tree.map(
      lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=sharding), tree
    )

  params = place(
    jax.tree.map(lambda a: a.update(shape=a.shape[1:]), likes), jax.P()
  )
  state = place(jax.eval_shape(make_state), jax.P(_AXIS))
  grads = jax.device_put(
    _make_arrays([a.shape for a in likes]),
    jax.sharding.NamedSharding(mesh, jax.P(_AXIS)),
  )
  jitted = jax.jit(step, donate_argnums=0, keep_unused=True)
  return timing.InPlace(jitted, (params, state), (grads,), _IN_FLIGHT)


def time_update(
  codec: codecs.Codec, shapes: Sequence[tuple[int, ...]]
) -> timing.TimedCalls:
  """Returns SGD updates with the decoded mean of two workers' payloads."""
  params = _make_arrays(shapes)

  def encode(x: jax.Array) -> Any:
    payload, _ = codec.encode(x, codec.init(x), make_key(0))
    return jax.tree.map(lambda a: jnp.stack([a] * _SENDERS), payload)

  def fn(params: Any, payloads: Any) -> Any:
    return [
      p - 0.1 / _SENDERS * codec.sum_decoded(payload, p)
      for p, payload in zip(params, payloads, strict=True)
    ]

  payloads = jax.jit(lambda xs: [encode(x) for x in xs])(params)
  jitted = jax.jit(fn, donate_argnums=0, keep_unused=True)
  return timing.InPlace(jitted, params, (payloads,))


def _list_work(
  names: Sequence[str], codec_names: Sequence[str], metrics: Sequence[str]
) -> Iterator[tuple[str, str, shape_cases.Awkward, str]]:
  """Yields (metric, codec, friendly shape, name), by friendly shapes."""
  # Encoding and decoding know no workers, so a tree is timed once; friendly
  # trees are not timed beside themselves. Without a codec nothing is encoded. A
  # codec that joins arrays is timed where there are several to exchange.
  friends = {
    n: shape_cases.find_friendly(
      shape_cases.count_values(shape_cases.AWKWARD[n].shapes)
    )
    for n in names
  }
  for metric in metrics:
    for codec in codec_names:
      if (metric, codec) == ("encode", shape_cases.PLAIN):
        continue
      joins = shape_cases.CODECS[codec].is_tree
      if joins and metric != "exchange":
        continue
      seen = {friend.shapes for friend in friends.values()}
      for name in sorted(names, key=lambda n: friends[n].shapes):
        shapes = shape_cases.AWKWARD[name].shapes
        if joins and len(shapes) == 1:
          continue
        if metric == "exchange" or shapes not in seen:
          yield metric, codec, friends[name], name
        seen.add(shapes)


def _time_shape(
  metric: str, codec_name: str, awkward: shape_cases.Awkward
) -> timing.TimedCalls:
  """Returns the calls that time one codec on one shape."""
  codec, shapes = shape_cases.CODECS[codec_name], awkward.shapes
  if metric == "exchange":
    return time_exchange(codec, shapes, awkward.workers)
  if metric == "update":
    return time_update(codec, shapes)
  arrays = _make_arrays(shapes)
  return run.time_encode(codec, {f"{i:04d}": x for i, x in enumerate(arrays)})


def _count_work(metric: str, awkward: shape_cases.Awkward) -> int:
  values = shape_cases.count_values(awkward.shapes)
  return values * (awkward.workers if metric == "exchange" else 1)


def _make_arrays(shapes: Sequence[tuple[int, ...]]) -> list[jax.Array]:
  rng = np.random.default_rng(0)
  return [
    jnp.asarray(rng.standard_normal(shape, dtype=np.float32))
    for shape in shapes
  ]


def make_rows(results: Sequence[Result]) -> list[records.Row]:
  """Returns a row for each result; its baseline is the friendly shape."""
  # Ratios are medians within repeats: the time that follows from the median
  # ratio is less noisy than the median time.
  rows = []
  for result in results:
    base = result.baseline
    time = records.Measured(result.value * base, "ns", result.noise * base)
    key = (tables.EXPERIMENT, result.case, f"{result.metric}_ns")
    row = records.make_row(*key, time, base, machine=_describe_stamp())
    rows.append(row._replace(ratio=result.value))
  return rows


def is_current(row: records.Row) -> bool:
  """Says whether a row is of this machine, these sources and this JAX."""
  return (row.machine, row.jax) == (_describe_stamp(), jax.__version__)


def _describe_stamp() -> str:
  sources = records.describe_sources(("experiments/codecs", "jaxmotion"))
  return f"{records.describe_machine()}; {sources}"
