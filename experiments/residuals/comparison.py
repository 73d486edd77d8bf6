"""Figures of one policy: compiled, predicted, and the seconds of both."""

import gc
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
from jax.extend import core

from experiments import gpu_compile
from experiments.common import records
from experiments.common.kept import describe_sources
from experiments.residuals import cases, kept, measure, policies
from jaxmotion.core import check_choice

EXPERIMENT = "residuals_compare"

# A trace takes as little as 20 ms, and other jobs make a single one longer.
_TRACES = 3
_PREDICTED = ("flops", "step_ms_predicted")
COMPILED = ("temp_bytes", "trace_s", "compile_s")
"""Figures that a compilation gives; the others are predicted."""


class Subject(NamedTuple):
  """A model that policies are compared on.

  Attributes:
    name: name in rows.
    make_task: function that returns the task, optionally of `wrap`.
    source: what says which version of the model it is, if anything.
  """

  name: str
  make_task: policies.MakeTask
  source: str = ""


class Figures(NamedTuple):
  """Figures of a training step under a policy, as metrics of rows.

  Attributes:
    temp_bytes: temporaries on the device, compiled.
    flops: FLOPs of the step, recomputed operations included.
    step_ms_predicted: time of the step, predicted from datasheets.
    trace_s: processor seconds of tracing, the least of three times.
    compile_s: processor seconds of lowering and compiling.
  """

  temp_bytes: float
  flops: float
  step_ms_predicted: float
  trace_s: float
  compile_s: float


_UNITS = {
  "temp_bytes": "bytes",
  "flops": "FLOP",
  "step_ms_predicted": "ms",
  "trace_s": "s",
  "compile_s": "s",
}


def measure_policy(policy: policies.Policy, target: str) -> Figures:
  """Compiles and predicts the step of a policy."""
  # Tracing begins without cached traces, so policies do not help one another.
  check_choice("target", target, tuple(measure.TARGETS))
  step = policy.build_step()
  trace_s: list[float] = []
  for _ in range(_TRACES):
    jax.clear_caches()
    gc.collect()
    begin = measure.processor_seconds()
    traced = measure.trace_step(step, target)
    traced_at = measure.processor_seconds()
    trace_s.append(traced_at - begin)
  compiled = measure.lower_traced(traced, target).compile()
  compiled_at = measure.processor_seconds()
  flops, step_ms = _predict_traced(traced, step, target)
  return Figures(
    compiled.memory_analysis().temp_size_in_bytes,
    flops,
    step_ms,
    min(trace_s),
    compiled_at - traced_at,
  )


def predict_again(
  policy: policies.Policy, target: str, found: Figures
) -> Figures:
  """Predicts the step of a policy again, without compiling it."""
  step = policy.build_step()
  traced = measure.trace_step(step, target)
  flops, step_ms = _predict_traced(traced, step, target)
  return found._replace(flops=flops, step_ms_predicted=step_ms)


def _predict_traced(
  traced: Any, step: cases.StepProgram, target: str
) -> tuple[float, float]:
  """Returns FLOPs and milliseconds of a step."""
  # It is not traced once more: that takes seconds for large steps.
  flat = [
    jax.ShapeDtypeStruct(a.shape, a.dtype) for a in jax.tree.leaves(step.args)
  ]
  again = cases.StepProgram(core.jaxpr_as_fun(traced.jaxpr), tuple(flat))
  prediction = measure.predict_figures(again, 0, target)
  return prediction.flops, 1e3 * prediction.step_s


def describe_stamp(
  subject: Subject, policy: str, metric: str, target: str
) -> str:
  """Returns what a figure of a policy holds for, as text."""
  sources = kept.MODELS
  if policies.is_ours(policy):
    sources = kept.OURS
  elif metric in _PREDICTED:
    sources = kept.COSTS
  versions = describe_sources(sources)
  if subject.source:
    versions = f"{subject.source}, {versions}"
  if metric in _PREDICTED:
    platform = measure.TARGETS[target]
    return f"{platform}: predicted from datasheets; {versions}"
  machine = "CPU"
  if target != "cpu":
    gpu = gpu_compile.find_gpu(target.upper())
    machine = f"{gpu.kind}, {gpu.memory_gib:g} GiB, without cuDNN's workspace"
  by = f", by {records.describe_machine()}" if metric.endswith("_s") else ""
  return f"{machine}: compiled, not run{by}; {versions}"


def make_rows(
  subject: Subject, policy: str, found: Figures | str, target: str
) -> list[records.Row]:
  """Returns the rows of one policy; ratios are added by `kept.add_ratios`."""
  items: list[tuple[str, float | str]] = [("temp_bytes", f"none: {found}")]
  if isinstance(found, Figures):
    items = list(found._asdict().items())
  return [
    records.Row(
      EXPERIMENT,
      f"{subject.name}/{policy}",
      metric,
      value,
      _UNITS[metric],
      None,
      None,
      None,
      describe_stamp(subject, policy, metric, target),
      jax.__version__,
    )
    for metric, value in items
  ]


def find_current(
  subject: Subject, policy: str, rows: Sequence[records.Row], target: str
) -> dict[str, float | str]:
  """Returns the figures of rows that hold still, by metric."""
  return {
    row.metric: row.value
    for row in rows
    if row.jax == jax.__version__
    and row.machine == describe_stamp(subject, policy, row.metric, target)
  }
