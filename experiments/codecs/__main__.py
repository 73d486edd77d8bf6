"""Times codecs on this machine against one numpy copy of the same array.

  python -m experiments.codecs --json=docs/results/bench_codecs.jsonl

One line a codec:
  encode_copies  encoding a matrix, in copies;
  update_ratio   decoding and averaging 2 workers' payloads of it inside an SGD
                 update, in updates with a gradient that is already there;
  vector_ratio   the same for a vector, whose blocks follow no rows;
  leaves64_ratio encoding 64 leaves, in encodings of one of the same size; so
                 for each count in --leaves.
Repeats are interleaved, numbers are medians of ratios within a repeat. Outputs
go to donated buffers, as they do in a training loop: pages that are touched for
the first time cost more than the codec. The copy has such a buffer too.
"""

import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import rich.progress
import rich.table
from absl import flags

from experiments.common import records, shared_flags
from experiments.common.console import make_console
from experiments.common.timing import InPlace, Timed, copy_of, measure
from jaxmotion import codecs, make_key

_ELEMENTS = flags.DEFINE_integer("elements", 1 << 24, "Floats to encode.")
_COLUMNS = flags.DEFINE_integer("columns", 4096, "Length of a row of them.")
_LEAVES = flags.DEFINE_multi_integer("leaves", [64, 256], "Leaves of a tree.")
_REPEATS = flags.DEFINE_integer("repeats", 9, "Interleaved repeats.")
_JSON = shared_flags.define_rows()


CASES = {
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
_BASELINE = "baseline"
UPDATES = ("bf16", "int8", "int4", "sign", "topk1")
TREES = ("bf16", "int8", "int4", "sign", "topk1")


class Result(NamedTuple):
  """One measured ratio.

  Attributes:
    case: name of the codec.
    metric: what was measured.
    value: median ratio to the baseline of the same repeat.
    noise: sample standard deviation of the ratio.
    baseline: median of the baseline, milliseconds.
  """

  case: str
  metric: str
  value: float
  noise: float
  baseline: float


def encoder(codec: codecs.Codec, x: Any) -> Timed:
  """Encodes a tree, with its state carried from call to call."""
  every = codecs.rules(((".*", codec),))

  def fn(last: Any, x: Any) -> Any:
    return every.encode(x, last[1], make_key(0))

  first = jax.eval_shape(lambda x: fn((None, every.init(x)), x), x)
  return _in_place(fn, first, x)


def updater(codec: codecs.Codec, x: jax.Array, workers: int = 2) -> Timed:
  """Decodes the workers' payloads, averages them and applies SGD."""
  payload, _ = jax.jit(codec.encode)(x, (), make_key(0))
  payloads = jax.tree.map(lambda a: jnp.stack([a] * workers), payload)

  def fn(params: jax.Array, payloads: Any) -> jax.Array:
    return params - 0.1 / workers * codec.sum_decoded(payloads, params)

  return _in_place(fn, x, payloads)


def plain_update(x: jax.Array) -> Timed:
  """SGD with a gradient that is there already."""
  return _in_place(lambda params, grads: params - 0.1 * grads, x, x)


def _in_place(fn: Callable[..., Any], outputs: Any, *args: Any) -> Timed:
  return InPlace(jax.jit(fn, donate_argnums=0, keep_unused=True), outputs, args)


def run(
  elements: int, columns: int, leaves: Sequence[int], repeats: int
) -> list[Result]:
  """Measures every column.

  Args:
    elements: floats in all.
    columns: length of a row; divides `elements`.
    leaves: leaves of each tree; they divide the number of rows.
    repeats: interleaved repeats.

  Raises:
    ValueError: the floats do not fill the rows, or the rows the leaves.
  """
  for count in leaves:
    if elements % (columns * count):
      raise ValueError(
        "`elements` must be a multiple of `columns` * `leaves`, got "
        f"{elements} for {columns} * {count}."
      )
  rng = np.random.default_rng(0)
  flat = jnp.asarray(rng.standard_normal(elements, dtype=np.float32))
  groups = _groups(flat.reshape(-1, columns), flat, leaves)
  total = 3 + len(leaves) * len(TREES)
  results = []
  for metric, baseline, cases in rich.progress.track(groups, total=total):
    times = measure({_BASELINE: baseline, **cases}, repeats)
    for case in cases:
      ratio, noise = times.ratio(_BASELINE, case)
      base = times.median(_BASELINE)
      results.append(Result(case, metric, ratio, noise, base))
  return results


def _groups(
  x: jax.Array, flat: jax.Array, leaves: Sequence[int]
) -> Iterator[tuple[str, Timed, dict[str, Timed]]]:
  """A metric, its baseline and its cases at a time."""
  encoders = {case: encoder(codec, x) for case, codec in CASES.items()}
  yield "encode_copies", copy_of(2 * x.nbytes), encoders
  for metric, array in (("update_ratio", x), ("vector_ratio", flat)):
    updates = {case: updater(CASES[case], array) for case in UPDATES}
    yield metric, plain_update(array), updates
  for count in leaves:
    pieces = jnp.split(x, count)
    tree = {f"leaf{i:04d}": piece for i, piece in enumerate(pieces)}
    for case in TREES:
      many = {case: encoder(CASES[case], tree)}
      yield f"leaves{count}_ratio", encoders[case], many


def make_table(results: list[Result]) -> rich.table.Table:
  """A line for each codec, a column for each metric."""
  metrics = list(dict.fromkeys(r.metric for r in results))
  values = {(r.case, r.metric): r for r in results}
  table = rich.table.Table(
    title=f"{records.machine()}, JAX {jax.__version__}",
    caption="medians of ratios, ± sample standard deviation",
  )
  table.add_column("codec")
  for metric in metrics:
    table.add_column(metric, justify="right")
  for case in CASES:
    cells = []
    for metric in metrics:
      r = values.get((case, metric))
      cells.append("" if r is None else f"{r.value:.2f} ± {r.noise:.2f}")
    table.add_row(case, *cells)
  return table


def write(results: list[Result], path: str | os.PathLike[str]) -> None:
  """Writes a row for each measurement."""
  stamp = (records.machine(), jax.__version__)
  records.write_rows(
    path,
    (
      records.Row(
        "bench_codecs",
        r.case,
        r.metric,
        r.value * r.baseline,
        "ms",
        r.baseline,
        r.value,
        r.noise,
        *stamp,
      )
      for r in results
    ),
  )


def main() -> None:
  """Measures, prints the table and writes rows."""
  results = run(_ELEMENTS.value, _COLUMNS.value, _LEAVES.value, _REPEATS.value)
  make_console().print(make_table(results))
  if _JSON.value:
    write(results, _JSON.value)


if __name__ == "__main__":
  shared_flags.run_main(main)
