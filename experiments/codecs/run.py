"""Timing of codecs against copies, plain updates and single arrays."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import rich.progress

from experiments.codecs.cases import CODECS, TREES, UPDATES
from experiments.common import console, timing
from jaxmotion import codecs, make_key

_BASELINE = "baseline"


class Result(NamedTuple):
  """One measured ratio of times.

  Attributes:
    case: name of the codec.
    metric: name of the ratio, as in the rows.
    value: median ratio to the baseline of the same repeat.
    noise: sample standard deviation of the ratio.
    baseline: median time of the baseline, milliseconds.
  """

  case: str
  metric: str
  value: float
  noise: float
  baseline: float


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
  total = 3 + len(leaves) * len(TREES)
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
    updates = {case: time_update(CODECS[case], array) for case in UPDATES}
    yield metric, time_plain_update(array), updates
  for count in leaves:
    pieces = jnp.split(x, count)
    tree = {f"leaf{i:04d}": piece for i, piece in enumerate(pieces)}
    for case in TREES:
      many = {case: time_encode(CODECS[case], tree)}
      yield f"leaves{count}_ratio", encoders[case], many
