"""Measures training steps of a model under plans of residuals, on this device.

  python -m experiments.gpu.plans --model=gpt --json=plans.jsonl

The model is one of `experiments.models.losses`, with options as in
`gpt:layers=12:batch=4`. Plans: plain; `jax.checkpoint` of each block; and
`memory.compress_residuals` without loss, in 8 and in 4 bits, and with the
residuals on the host. All are compiled, then timed in interleaved repeats.
Metrics are `step_ms`, `temp_bytes` of the compiled program, and `peak_bytes`
that the device counted. It counts the most bytes since the process began: plans
run in the order of their compiled bytes, and a plan below the peak so far gets
that peak. A plan that does not fit gets a row that says so.
"""

import functools
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from experiments.common import list_flags, records, shared_flags, timing
from experiments.models import losses
from jaxmotion import codecs, memory
from jaxmotion.core import PyTree


def _check_model(text: str) -> str:
  """Returns the text of a model that can be made."""
  losses.parse_task(text)()
  return text


_MODEL = list_flags.define_item(
  "model", "gpt", _check_model, "Model and its options."
)
_REPEATS = shared_flags.define_repeats(5)
_JSON = shared_flags.define_rows()

_OURS: Mapping[str, Callable[[], Any]] = {
  "ours": lambda: None,
  "ours_8bits": lambda: codecs.uniform(bits=8, block=64),
  "ours_4bits": lambda: codecs.uniform(bits=4, block=64),
  "ours_host": memory.offload,
}


class Plan(NamedTuple):
  """A compiled training step."""

  name: str  # Name of the plan.
  # Function (params, batch) -> loss and gradients.
  run: Callable[[PyTree, PyTree], PyTree]
  temp_bytes: int  # Temporaries on the device.


def main() -> None:
  """Compiles and times all plans; writes rows."""
  rows = []
  for row in measure_plans(_MODEL.value, _REPEATS.value):
    value = row.value if isinstance(row.value, str) else f"{row.value:,.4g}"
    print(f"{row.case} {row.metric}: {value} {row.unit}")
    rows.append(row)
    records.write_rows(_JSON.value, rows)


def measure_plans(model: str, repeats: int) -> list[records.Row]:
  """Returns step times and memory of a model under all plans."""
  make_task = losses.parse_task(model)
  task, name = make_task(), model.split(":")[0]
  steps = {
    "plain": task.loss_fn,
    "jax_block": make_task(wrap=jax.checkpoint).loss_fn,
    **{
      plan: memory.compress_residuals(task.loss_fn, make_codec())
      for plan, make_codec in _OURS.items()
    },
  }
  with ThreadPoolExecutor() as threads:
    compile_one = functools.partial(_compile_plan, task)
    plans = list(threads.map(compile_one, steps.items()))
  plans.sort(key=lambda plan: plan.temp_bytes)
  args = _fill(task.params), _fill(task.batch)
  rows: list[records.Row] = []
  taken: dict[str, timing.TimedCalls] = {}

  def add(
    plan: str, metric: str, found: records.Measured, base: float | None = None
  ) -> None:
    key = ("gpu_plans", f"{name}/{plan}", metric)
    rows.append(records.make_row(*key, found, base))

  for plan in plans:
    add(plan.name, "temp_bytes", records.Measured(plan.temp_bytes, "bytes"))
    try:
      jax.block_until_ready(plan.run(*args))
    except jax.errors.JaxRuntimeError as failure:
      reason = f"not measured: {str(failure).splitlines()[0]}"
      add(plan.name, "step_ms", records.Measured(reason, "ms"))
      continue
    taken[plan.name] = _repeat_step(plan, args)
    add(plan.name, "peak_bytes", records.Measured(_read_peak(), "bytes"))
  times = timing.measure_times(taken, repeats)
  base = times.median("plain") if "plain" in taken else None
  for plan_name, ms in times.ms.items():
    noise = records.find_spread(ms)
    median = records.Measured(times.median(plan_name), "ms", noise)
    add(plan_name, "step_ms", median, base)
  return rows


def _compile_plan(
  task: losses.Task, step: tuple[str, Callable[..., PyTree]]
) -> Plan:
  name, loss_fn = step
  lowered = jax.jit(jax.value_and_grad(loss_fn)).lower(task.params, task.batch)
  compiled: Any = lowered.compile()
  return Plan(name, compiled, compiled.memory_analysis().temp_size_in_bytes)


def _repeat_step(plan: Plan, args: tuple[PyTree, ...]) -> timing.TimedCalls:
  def run(calls: int) -> None:
    for _ in range(calls):
      result = plan.run(*args)
    jax.block_until_ready(result)

  return run


def _fill(shapes: PyTree) -> PyTree:
  """Returns small random floats, and zeros of other dtypes."""

  def make_array(i: int, like: Any) -> Any:
    if not jnp.issubdtype(like.dtype, jnp.floating):
      return jnp.zeros(like.shape, like.dtype)
    key = jax.random.key(i)
    return 0.02 * jax.random.normal(key, like.shape, like.dtype)

  leaves, treedef = jax.tree.flatten(shapes)
  return jax.tree.unflatten(
    treedef, [make_array(i, like) for i, like in enumerate(leaves)]
  )


def _read_peak() -> float | str:
  stats = jax.devices()[0].memory_stats()
  if not stats or "peak_bytes_in_use" not in stats:
    return "not measured: this device counts no bytes"
  return stats["peak_bytes_in_use"]


if __name__ == "__main__":
  shared_flags.run_main(main)
