"""Traces, compiles and runs steps of models with many arrays.

  python -m experiments.codecs.programs --json=results/codecs_programs.jsonl

A step trains on emulated workers, which share the cores, or on one GPU. For
each model, plain JAX comes first, then exchanges with each codec and sharded
optimizers, in processes of their own:
  program_s   seconds to trace and compile the step;
  kernels     fusions and custom calls of the program, and `copies`;
  step_ms     milliseconds of the fastest step;
  temp_mb     temporaries of the compiled step.

Rounds are interleaved. Seconds are those of the fastest round. Tables show
ratios to plain JAX.
"""

import functools
import multiprocessing
import re
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import optax
import rich.progress
from absl import flags
from jax.sharding import NamedSharding, PartitionSpec as P

import jaxmotion
from experiments.codecs import program_models, run, tables
from experiments.common import console, list_flags, records, shared_flags
from experiments.common.records import Measured
from jaxmotion import codecs

_PLAIN = "plain"
Wrap = Callable[[optax.GradientTransformation], optax.GradientTransformation]


def _exchange(codec: codecs.Codec) -> Wrap:
  """Returns a function that puts an exchange before an optimizer."""
  return lambda tx: optax.chain(jaxmotion.exchange("data", codec), tx)


def _shard(codec: codecs.Codec) -> Wrap:
  """Returns a function that shards an optimizer, with weights in 8 bits."""
  return functools.partial(
    jaxmotion.sharded,
    "data",
    gradient_codec=codec,
    weight_codec=run.CODECS["int8"],
  )


WRAPS: dict[str, Wrap | None] = {
  _PLAIN: None,
  "identity": _exchange(codecs.identity()),
} | {
  name: _exchange(run.CODECS[name])
  for name in ("int8", "int4_feedback", "sign_feedback", "topk1_feedback")
}
WRAPS |= {
  f"sharded_{name}": _shard(run.CODECS[name])
  for name in ("int8", "int4_feedback")
}
_MODELS = list_flags.define_names(
  "models", program_models.MODELS, program_models.MODELS, "Models to compile."
)
_CODECS = list_flags.define_names(
  "only_codecs", WRAPS, WRAPS, "Codecs of the exchanges; plain always runs."
)
_WORKERS = flags.DEFINE_integer(
  "workers", 4, "Emulated workers.", 1, allow_override=True
)
_ROUNDS = flags.DEFINE_integer(
  "rounds", 2, "Rounds of all cases.", 1, allow_override=True
)
_REPEATS = shared_flags.define_repeats(8)
_JSON = shared_flags.define_rows()


def measure_case(
  model: str, codec: str, workers: int, repeats: int
) -> dict[str, float]:
  """Compiles and runs the step of a model; returns its figures."""
  jax.config.update("jax_num_cpu_devices", workers)
  mesh = jax.sharding.Mesh(jax.devices()[:workers], ("data",))
  net = program_models.MODELS[model]()
  params = {name: jnp.full(shape, 0.01) for name, shape in net.params.items()}
  batch = jax.tree.map(
    lambda like: jax.device_put(
      jnp.ones(like.shape, like.dtype), NamedSharding(mesh, P("data"))
    ),
    net.batch,
  )
  step, args = _make_step(net, params, WRAPS[codec], mesh)
  begin = time.perf_counter()
  compiled: Any = jax.jit(step).lower(*args, batch).compile()
  seconds = time.perf_counter() - begin
  text = compiled.as_text()
  times = []
  for _ in range(repeats + 1):
    begin = time.perf_counter()
    args = jax.block_until_ready(compiled(*args, batch)[: len(args)])
    times.append(time.perf_counter() - begin)
  return {
    "program_s": seconds,
    "kernels": len(re.findall(r" (?:fusion|custom-call)\(", text)),
    "copies": len(re.findall(r" copy\(", text)),
    "step_ms": 1e3 * min(times[1:]),
    "temp_mb": compiled.memory_analysis().temp_size_in_bytes / 1e6,
  }


def _make_step(
  net: program_models.Model, params: Any, wrap: Wrap | None, mesh: Any
) -> tuple[Any, tuple[Any, ...]]:
  """Returns the step, and what it takes before the batch."""
  adamw = optax.adamw(1e-3)
  if wrap is not None:
    init, step = jaxmotion.make_train_step(
      net.loss, wrap(adamw), mesh, overlap="program", donate=False
    )
    return step, (init(params),)

  def plain_step(params: Any, state: Any, batch: Any) -> Any:
    loss, grads = jax.value_and_grad(net.loss)(params, batch)
    updates, state = adamw.update(grads, state, params)
    return optax.apply_updates(params, updates), state, loss

  params = jax.device_put(params, NamedSharding(mesh, P()))
  return plain_step, (params, jax.jit(adamw.init)(params))


def make_rows(results: dict[tuple[str, str], dict[str, float]]) -> list[Any]:
  """Returns a row of each figure, beside that of plain JAX."""
  rows = []
  for (model, codec), figures in results.items():
    plain = results[model, _PLAIN]
    for metric, value in figures.items():
      measured = Measured(value, tables.PROGRAM_UNITS[metric])
      key = tables.PROGRAMS, f"{model}/{codec}", metric, measured
      rows.append(records.make_row(*key, baseline=plain[metric]))
  return rows


def main() -> None:
  """Measures the cases, prints the table and writes rows."""
  names = dict.fromkeys((_PLAIN, *_CODECS.value))
  cases = [(model, codec) for model in _MODELS.value for codec in names]
  results: dict[tuple[str, str], dict[str, float]] = {}
  for model, codec in rich.progress.track(cases * _ROUNDS.value):
    # A process of its own has traced and compiled nothing before.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, context) as process:
      job = model, codec, _WORKERS.value, _REPEATS.value
      figures = process.submit(measure_case, *job).result()
    best = results.setdefault((model, codec), figures)
    results[model, codec] = {m: min(best[m], figures[m]) for m in figures}
    if (model, _PLAIN) in results:
      records.write_rows(_JSON.value, make_rows(results))
  table = tables.programs_table(make_rows(results))
  console.make_console().print(table.to_console())


if __name__ == "__main__":
  shared_flags.run_main(main)
