"""Runs training steps of a model under policies of saving, on this device.

  python -m experiments.residuals.steps --model=gpt --json=steps.jsonl

The model is one of `experiments.models.losses`, with options as in
`gpt:layers=12:batch=4`. Policies are those of `experiments.residuals.compare`,
and `ours_host`, whose residuals are in host memory. All are compiled, then
timed in interleaved repeats. Metrics are `step_ms`, and `step_ms_predicted`
from the datasheet of the device if there is one; `temp_bytes` of the compiled
program, and `peak_bytes` that the device counted. It counts the most bytes
since the process began: policies run in the order of their compiled bytes, and
one below the peak so far gets that peak. A policy that does not fit gets a row
that says so.
"""

import functools
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from experiments.common import list_flags, records, shared_flags, timing
from experiments.common.console import make_console
from experiments.models import losses
from experiments.residuals import measure, networks, policies, tables
from jaxmotion import memory
from jaxmotion.core import PyTree

_MODEL = list_flags.define_item(
  "model", "gpt", networks.check_model, "Model and its options."
)
_REPEATS = shared_flags.define_repeats(5)
_JSON = shared_flags.define_rows()


class _Compiled(NamedTuple):
  """A training step that is compiled for this device."""

  name: str  # Name of the policy.
  run: Any  # Function (params, batch) -> loss and gradients.
  temp_bytes: int  # Temporaries on the device.
  predicted_ms: float | str  # Milliseconds by the datasheet, or why not.


def main() -> None:
  """Compiles and times the steps of all policies; writes rows."""
  rows = measure_steps(_MODEL.value, _REPEATS.value)
  make_console().print(tables.steps_table(rows).to_console())
  records.write_rows(_JSON.value, rows)


def measure_steps(model: str, repeats: int) -> list[records.Row]:
  """Returns step times and memory of a model under policies."""
  make_task = losses.parse_task(model)
  task = make_task()
  chosen = [
    p for p in policies.list_policies(make_task) if p.name in tables.RUN
  ]
  chosen.append(policies.make_coded(task, "host", memory.offload()))
  with ThreadPoolExecutor() as threads:
    steps = list(threads.map(_compile_step, chosen))
  steps.sort(key=lambda step: step.temp_bytes)
  args = _fill_arrays(task.params), _fill_arrays(task.batch)
  rows: list[records.Row] = []
  taken: dict[str, timing.TimedCalls] = {}

  def add(
    policy: str,
    metric: str,
    value: float | str,
    unit: str,
    *,
    noise: float | None = None,
    base: float | None = None,
  ) -> None:
    key = (tables.STEPS, f"{model}/{policy}", metric)
    found = records.Measured(value, unit, noise)
    rows.append(records.make_row(*key, found, base))

  for step in steps:
    add(step.name, "temp_bytes", step.temp_bytes, "bytes")
    add(step.name, "step_ms_predicted", step.predicted_ms, "ms")
    try:
      jax.block_until_ready(step.run(*args))
    except jax.errors.JaxRuntimeError as failure:
      reason = f"not measured: {str(failure).splitlines()[0]}"
      add(step.name, "step_ms", reason, "ms")
      continue
    taken[step.name] = functools.partial(_repeat_step, step.run, args)
    add(step.name, "peak_bytes", _read_peak(), "bytes")
  times = timing.measure_times(taken, repeats)
  base = times.median("plain") if "plain" in taken else None
  for name, ms in times.ms.items():
    noise = records.find_spread(ms)
    add(name, "step_ms", times.median(name), "ms", noise=noise, base=base)
  return rows


def _compile_step(policy: policies.Policy) -> _Compiled:
  step = policy.build_step()
  traced = jax.jit(step.fn).trace(*step.args)
  compiled: Any = traced.lower().compile()
  needs = compiled.memory_analysis()
  predicted: float | str = "not predicted: no datasheet of this device"
  if target := _find_target():
    host_bytes = needs.host_temp_size_in_bytes
    found = measure.predict_traced(traced, step, host_bytes, target)
    predicted = 1e3 * found.step_s
  return _Compiled(policy.name, compiled, needs.temp_size_in_bytes, predicted)


def _find_target() -> str | None:
  """Returns the name of this device among those that are predicted."""
  kind = jax.devices()[0].device_kind.lower()
  return next((name for name in measure.TARGETS if name in kind), None)


def _repeat_step(run: Any, args: tuple[PyTree, ...], calls: int) -> None:
  for _ in range(calls):
    result = run(*args)
  jax.block_until_ready(result)


def _fill_arrays(shapes: PyTree) -> PyTree:
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
