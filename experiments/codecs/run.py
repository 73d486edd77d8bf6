"""Timing of codecs against copies, plain updates and single arrays; rows."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import rich.progress

from experiments.common import console, records, timing
from jaxmotion import codecs, make_key

CODECS = {
  "bf16": codecs.cast("bfloat16"),
  "fp8_e4m3": codecs.cast("float8_e4m3fn"),
  "fp8_e5m2": codecs.cast("float8_e5m2"),
  "truncate1": codecs.truncate(bytes=1),
  "truncate2": codecs.truncate(bytes=2),
  "truncate3": codecs.truncate(bytes=3),
  "int8": codecs.uniform(bits=8),
  "int8_stochastic": codecs.uniform(bits=8, rounding="stochastic"),
  "int8_minmax": codecs.uniform(bits=8, symmetric=False),
  "int4": codecs.uniform(bits=4),
  "int4_stochastic": codecs.uniform(bits=4, rounding="stochastic"),
  "int2": codecs.uniform(bits=2),
  "sign": codecs.sign(),
  "topk1": codecs.topk(density=0.01),
  "topk1_int8": codecs.chain(codecs.topk(density=0.01), codecs.uniform(bits=8)),
  "int8_feedback": codecs.feedback(codecs.uniform(bits=8)),
  "int4_feedback": codecs.feedback(codecs.uniform(bits=4)),
  "sign_feedback": codecs.feedback(codecs.sign()),
  "topk1_feedback": codecs.feedback(codecs.topk(density=0.01)),
}
"""Codec by name; all of them are timed at encoding a matrix."""

SOME = ("bf16", "int8", "int4", "sign", "topk1")
"""Codecs timed inside an SGD update, and at encoding trees of many leaves."""

_BASELINE = "baseline"


class Result(NamedTuple):
  """One measured ratio of times."""

  case: str  # Name of the codec.
  metric: str  # Name of the ratio, as in the rows.
  value: float  # Median ratio to the baseline of the same repeat.
  noise: float  # Sample standard deviation of the ratio.
  baseline: float  # Median time of the baseline, milliseconds.


def measure_codecs(
  elements: int, columns: int, leaves: Sequence[int], repeats: int
) -> list[Result]:
  """Measures every metric of every codec it covers."""
  for count in leaves:
    if elements % (columns * count):
      raise console.JobError(
        "`elements` must be a multiple of `columns` * `leaves`, got "
        f"{elements} for {columns} * {count}."
      )
  rng = np.random.default_rng(0)
  flat = jnp.asarray(rng.standard_normal(elements, dtype=np.float32))
  groups = _make_groups(flat.reshape(-1, columns), flat, leaves)
  total = 3 + len(leaves) * len(SOME)
  results = []
  for metric, baseline, cases in rich.progress.track(groups, total=total):
    times = timing.measure_times({_BASELINE: baseline, **cases}, repeats)
    for case in cases:
      ratio, noise = times.ratio(_BASELINE, case)
      base = times.median(_BASELINE)
      results.append(Result(case, metric, ratio, noise, base))
  return results


def time_encode(codec: codecs.Codec, x: Any) -> timing.TimedCalls:
  """Returns the encoding of a tree, with state carried from call to call."""
  every_leaf = codecs.rules(((".*", codec),))

  def fn(last: Any, x: Any) -> Any:
    return every_leaf.encode(x, last[1], make_key(0))

  first = jax.eval_shape(lambda x: fn((None, every_leaf.init(x)), x), x)
  return _run_in_place(fn, first, x)


def time_update(
  codec: codecs.Codec, x: jax.Array, workers: int = 2
) -> timing.TimedCalls:
  """Returns an SGD update with the decoded mean of the workers' payloads."""
  payload, _ = jax.jit(codec.encode)(x, (), make_key(0))
  payloads = jax.tree.map(lambda a: jnp.stack([a] * workers), payload)

  def fn(params: jax.Array, payloads: Any) -> jax.Array:
    return params - 0.1 / workers * codec.sum_decoded(payloads, params)

  return _run_in_place(fn, x, payloads)


def time_plain_update(x: jax.Array) -> timing.TimedCalls:
  """Returns an SGD update with a gradient that needs no decoding."""
  return _run_in_place(lambda params, grads: params - 0.1 * grads, x, x)


def _run_in_place(
  fn: Callable[..., Any], outputs: Any, *args: Any
) -> timing.TimedCalls:
  return timing.InPlace(
    jax.jit(fn, donate_argnums=0, keep_unused=True), outputs, args
  )


def _make_groups(
  x: jax.Array, flat: jax.Array, leaves: Sequence[int]
) -> Iterator[tuple[str, timing.TimedCalls, dict[str, timing.TimedCalls]]]:
  """Yields a metric, its baseline and its cases at a time."""
  encoders = {case: time_encode(codec, x) for case, codec in CODECS.items()}
  yield "encode_copies", timing.make_copy(2 * x.nbytes), encoders
  for metric, array in (("update_ratio", x), ("vector_ratio", flat)):
    updates = {case: time_update(CODECS[case], array) for case in SOME}
    yield metric, time_plain_update(array), updates
  for count in leaves:
    pieces = jnp.split(x, count)
    tree = {f"leaf{i:04d}": piece for i, piece in enumerate(pieces)}
    for case in SOME:
      many = {case: time_encode(CODECS[case], tree)}
      yield f"leaves{count}_ratio", encoders[case], many


def make_rows(results: Sequence[Result]) -> list[records.Row]:
  """Returns two rows for each result: the ratio, and its times in ms."""
  return [row for result in results for row in _make_pair(result)]


def _make_pair(result: Result) -> Iterator[records.Row]:
  """Yields the ratio of a result, then its milliseconds."""
  case, base = result.case, result.baseline
  stem, _, kind = result.metric.rpartition("_")
  unit = "copies" if kind == "copies" else "x"
  ratio = records.Measured(result.value, unit, result.noise)
  yield records.make_row("codecs", case, result.metric, ratio)
  # Ratios are medians within repeats: the time that follows from the median
  # ratio is less noisy than the median time.
  time = records.Measured(result.value * base, "ms")
  row = records.make_row("codecs", case, f"{stem}_ms", time, base)
  yield row._replace(ratio=result.value)
