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

With --compiled, steps are compiled for GPUs that are not there, and not run:
  launches    kernels that a step launches on each GPU, collectives included.
"""

import functools
import multiprocessing
import re
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
import rich.progress
from absl import flags
from jax.sharding import NamedSharding, PartitionSpec as P

import jaxmotion
from experiments import gpu_compile
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
_COMPILED = flags.DEFINE_bool(
  "compiled",
  False,
  "Whether to count the launches of steps compiled for as many H100s.",
  allow_override=True,
)
_REPEATS = shared_flags.define_repeats(8)
_JSON = shared_flags.define_rows()


def measure_case(
  model: str, codec: str, workers: int, repeats: int
) -> dict[str, float]:
  """Compiles and runs the step of a model; returns its figures."""
  jax.config.update("jax_num_cpu_devices", workers)
  case = _make_case(model, codec, jax.devices()[:workers])
  fill = lambda like: jax.device_put(
    jnp.full(like.shape, 0.01, like.dtype), like.sharding
  )
  params, batch = jax.tree.map(fill, (case.params, case.batch))
  args = case.init(params)
  begin = time.perf_counter()
  compiled: Any = jax.jit(case.step).lower(*args, batch).compile()
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


def count_launches(model: str, codec: str, workers: int) -> dict[str, float]:
  """Counts the kernels of a step compiled for GPUs that are not there."""
  gpu_compile.stay_on_host()
  gpu_compile.check_compiler()
  gpu = gpu_compile.find_gpu()
  case = _make_case(model, codec, gpu_compile.find_devices(gpu, workers))
  lower = lambda fn, *args, **options: (
    jax.jit(fn, **options).trace(*args).lower(lowering_platforms=("cuda",))
  )
  init: Any = lower(case.init, case.params)
  args = jax.tree.map(
    lambda like, sharding: like.update(sharding=sharding),
    jax.eval_shape(case.init, case.params),
    init.compile().output_shardings,
  )
  # A state that is not donated would be copied at every step. JAX ignores what
  # is donated to a function that is a `jit` already.
  run = lambda *args: case.step(*args)
  donated = range(len(args))
  step = lower(run, *args, case.batch, donate_argnums=donated)
  launches = gpu_compile.compile_lowered(step, gpu).launches
  if launches is None:
    raise RuntimeError(f"The step of {model} has a loop of unknown length.")
  return {"launches": launches}


class _Case(NamedTuple):
  """A step, and the shapes that it takes."""

  params: dict[str, jax.ShapeDtypeStruct]
  batch: dict[str, jax.ShapeDtypeStruct]
  init: Callable[[Any], tuple[Any, ...]]  # What a step takes before the batch.
  step: Callable[..., Any]


def _make_case(model: str, codec: str, devices: Sequence[Any]) -> _Case:
  """Returns the step of a model through a codec on some devices."""
  mesh = jax.sharding.Mesh(devices, ("data",))
  net, wrap = program_models.MODELS[model](), WRAPS[codec]

  def place(like: jax.ShapeDtypeStruct, *axes: str) -> jax.ShapeDtypeStruct:
    """Returns the shape of an array that is split along these axes."""
    return like.update(sharding=NamedSharding(mesh, P(*axes)))

  params = {
    name: place(jax.ShapeDtypeStruct(shape, jnp.float32))
    for name, shape in net.params.items()
  }
  batch = {name: place(like, "data") for name, like in net.batch.items()}
  adamw = optax.adamw(1e-3)
  if wrap is not None:
    init, step = jaxmotion.make_train_step(
      net.loss, wrap(adamw), mesh, overlap="program", donate=False
    )
    return _Case(params, batch, lambda params: (init(params),), step)

  def plain_step(params: Any, state: Any, batch: Any) -> Any:
    loss, grads = jax.value_and_grad(net.loss)(params, batch)
    updates, state = adamw.update(grads, state, params)
    return optax.apply_updates(params, updates), state, loss

  init_plain = jax.jit(adamw.init)
  return _Case(params, batch, lambda p: (p, init_plain(p)), plain_step)


def make_rows(results: dict[tuple[str, str], dict[str, float]]) -> list[Any]:
  """Returns a row of each figure, beside that of plain JAX."""
  rows = []
  for (model, codec), figures in results.items():
    plain = results[model, _PLAIN]
    for metric, value in figures.items():
      experiment, unit = tables.PROGRAM_UNITS[metric]
      key = experiment, f"{model}/{codec}", metric, Measured(value, unit)
      rows.append(records.make_row(*key, baseline=plain[metric]))
  return rows


def main() -> None:
  """Measures the cases, prints the table and writes rows."""
  names = dict.fromkeys((_PLAIN, *_CODECS.value))
  cases = [(model, codec) for model in _MODELS.value for codec in names]
  if _COMPILED.value:
    gpu_compile.stay_on_host()
    gpu_compile.check_compiler()
    rounds, measure = 1, count_launches
  else:
    rounds = _ROUNDS.value
    measure = functools.partial(measure_case, repeats=_REPEATS.value)
  results: dict[tuple[str, str], dict[str, float]] = {}
  for model, codec in rich.progress.track(cases * rounds):
    # A process of its own has traced and compiled nothing before.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, context) as process:
      job = process.submit(measure, model, codec, _WORKERS.value)
      figures = job.result()
    best = results.setdefault((model, codec), figures)
    results[model, codec] = {m: min(best[m], figures[m]) for m in figures}
    if (model, _PLAIN) in results:
      records.write_rows(_JSON.value, make_rows(results))
  table = tables.summary_table(make_rows(results))
  console.make_console().print(table.to_console())


if __name__ == "__main__":
  shared_flags.run_main(main)
