"""Compares ours with every stock policy, on any model, in one run.

  JAX_PLATFORMS=cpu python -m experiments.residuals.compare \\
    --models=gpt,gpt_unrolled:layers=12,resnet50 --json=results/compare.jsonl
  JAX_PLATFORMS=cpu python -m experiments.residuals.compare \\
    --file=/path/my_model.py:make_loss --json=results/mine.jsonl

A file of yours has a function that returns `(loss_fn, params, batch)`: a
function (params, batch) -> loss, and trees of arrays or of shapes. `loss_fn` is
differentiated with respect to `params`. If the function has a parameter `wrap`,
it passes each block through it, and policies are compared around blocks, too:

  def make_loss(wrap=lambda block: block):
    block = wrap(lambda params, x: x + jax.nn.gelu(x @ params))
    def loss_fn(params, x):
      for own in params:
        x = block(own, x)
      return jnp.mean(x**2)
    like = jax.ShapeDtypeStruct
    params = [like((256, 256), "float32")] * 4
    return loss_fn, params, like((1024, 256), "float32")

Models of ours are those of `experiments.models.losses`, with options as in
`gpt:layers=12:batch=4`. Policies:
  plain               what JAX saves by itself;
  jax_block_...       `jax.checkpoint` around each block;
  jax_whole_...       `jax.checkpoint` around the loss;
    nothing           saves nothing,
    dots, no_batch    matmuls; those without batch dimensions,
    names, name_X, names_but_X  values named by `checkpoint_name`: all, X alone,
                      all but X;
  ours, ours_budget_X, ours_Xbits  `memory.compress_residuals` of the loss: by
                      default, with `memory_budget=X`, with X bits. Further
                      budgets have the FLOPs of stock policies that hold less;
  ours_flops_budget_X where these hold less still: with a `device` on which
                      FLOPs alone take time.

Every program is compiled for a GPU that need not be there (the extra
`cuda-compile`) and not run. Metrics are `temp_bytes` (between arguments and
results), `flops`, `step_ms_predicted`, `trace_s` and `compile_s` (seconds of
processors), each beside that of plain. With --json, rows are written as they
come. Rows of the same model, policy, sources and JAX that are there already are
not measured again, unless with --fresh.
"""

import fnmatch
import functools
import gc
import hashlib
import inspect
import os
import pathlib
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
from absl import flags

from experiments import gpu_compile
from experiments.common import console, list_flags, records, shared_flags
from experiments.common.console import JobError, make_console
from experiments.common.records import describe_sources, read_cases
from experiments.models import losses
from experiments.residuals import measure, networks, policies, tables
from experiments.residuals.measure import add_ratios
from experiments.residuals.policies import (
  Policy,
  count_flops_alone,
  find_budget,
  list_policies,
)
from jaxmotion import core
from jaxmotion.command import extend

EXPERIMENT = "residuals_compare"

# A trace takes as little as 20 ms, and other jobs make a single one longer.
_TRACES = 3
_PREDICTED = ("flops", "step_ms_predicted")
COMPILED = ("temp_bytes", "trace_s", "compile_s")
"""Figures that a compilation gives; the others are predicted."""


class Subject(NamedTuple):
  """A model that policies are compared on."""

  name: str  # Name in rows.
  # Function that returns the task, optionally of `wrap`.
  make_task: policies.MakeTask
  source: str = ""  # What says which version of the model it is, if anything.


class Figures(NamedTuple):
  """Figures of a training step under a policy, as metrics of rows."""

  temp_bytes: float  # Temporaries on the device, compiled.
  flops: float  # FLOPs of the step, recomputed operations included.
  step_ms_predicted: float  # Time of the step, predicted from datasheets.
  trace_s: float  # Processor seconds of tracing, the least of three times.
  compile_s: float  # Processor seconds of lowering and compiling.


_UNITS = dict(
  zip(Figures._fields, ("bytes", "FLOP", "ms", "s", "s"), strict=True)
)


def measure_policy(policy: policies.Policy, target: str) -> Figures:
  """Compiles and predicts the step of a policy."""
  # Tracing begins without cached traces, so policies do not help one another.
  core.choice(tuple(measure.TARGETS))("target", target)
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
  predicted = measure.predict_traced(traced, step, 0, target)
  return Figures(
    compiled.memory_analysis().temp_size_in_bytes,
    predicted.flops,
    1e3 * predicted.step_s,
    min(trace_s),
    compiled_at - traced_at,
  )


def predict_again(
  policy: policies.Policy, target: str, found: Figures
) -> Figures:
  """Predicts the step of a policy again, without compiling it."""
  step = policy.build_step()
  traced = measure.trace_step(step, target)
  predicted = measure.predict_traced(traced, step, 0, target)
  return found._replace(
    flops=predicted.flops, step_ms_predicted=1e3 * predicted.step_s
  )


def describe_stamp(
  subject: Subject, policy: str, metric: str, target: str
) -> str:
  """Returns what a figure of a policy holds for, as text."""
  sources = measure.MODELS
  if policies.is_ours(policy):
    sources = measure.OURS
  elif metric in _PREDICTED:
    sources = measure.COSTS
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
  """Returns the rows of one policy, without ratios to plain."""
  items: list[tuple[str, float | str]] = [("temp_bytes", f"none: {found}")]
  if isinstance(found, Figures):
    items = list(found._asdict().items())
  case = f"{subject.name}/{policy}"
  return [
    records.make_row(
      *(EXPERIMENT, case, metric, records.Measured(value, _UNITS[metric])),
      machine=describe_stamp(subject, policy, metric, target),
    )
    for metric, value in items
  ]


def load_task(text: str) -> Callable[..., losses.Task]:
  """Returns the function of a user's file, its result checked."""
  try:
    function = extend.load_function("--file", text)
  except extend.CommandError as error:
    raise console.JobError(str(error)) from error

  @functools.wraps(function)
  def make_task(*args: Any, **kwargs: Any) -> losses.Task:
    try:
      found = extend.call_user(text, function, *args, **kwargs)
      return losses.Task(*extend.check_task(text, found))
    except extend.CommandError as error:
      raise console.JobError(str(error)) from error

  make_task.__signature__ = inspect.signature(function)  # type: ignore[attr-defined]
  make_task()
  return make_task


_MODELS = list_flags.define_items(
  "models",
  list(losses.TASKS),
  networks.check_model,
  "Models, NAME or NAME:OPTION=VALUE; all by default, none with --file.",
)
_FILE = list_flags.define_items(
  "file", [], str, "Models of yours, FILE.py:FUNCTION.", least=0
)
_POLICIES = list_flags.define_items(
  "policies", ["*"], str, "Patterns of policies, beside plain.", least=0
)
_TARGET = measure.define_target()
_MATCH = flags.DEFINE_bool(
  "match",
  True,
  "Search budgets with the FLOPs of stock policies that hold less than ours.",
  allow_override=True,
)
_FRESH = shared_flags.define_fresh()
_JSON = shared_flags.define_rows()
_PLOT = shared_flags.define_plot()


def main() -> None:
  """Compiles and predicts; prints tables, writes rows and a plot."""
  target, console = _TARGET.value, make_console()
  subjects = list(_list_subjects())
  if why := measure.explain_refusal(target):
    console.print(f"Nothing can be compiled for {target}: {why}.")
    return
  rows = compare_models(
    subjects,
    _POLICIES.value,
    target,
    _JSON.value,
    match=_MATCH.value,
    fresh=_FRESH.value,
  )
  console.print(tables.figures_table(rows).to_console())
  console.print(tables.losses_table(rows).to_console())
  console.print(tables.verdict_table(rows).to_console())
  if _PLOT.value:
    from experiments.residuals.plot import save_frontiers  # matplotlib.

    save_frontiers(rows, _PLOT.value)


def _list_subjects() -> Iterator[Subject]:
  """Yields the models of the flags."""
  if flags.FLAGS["models"].present or not _FILE.value:
    for text in _MODELS.value:
      yield Subject(text, losses.parse_task(text))
  for text in _FILE.value:
    make_task = load_task(text)
    path = pathlib.Path(text.rpartition(":")[0])
    digest = hashlib.sha256(path.read_bytes()).hexdigest()[:12]
    name = f"{path.stem}.{text.rpartition(':')[2]}"
    yield Subject(name, make_task, f"{path.name} {digest}")


def compare_models(
  subjects: list[Subject],
  patterns: list[str],
  target: str,
  path: str | os.PathLike[str] | None = None,
  *,
  match: bool = True,
  fresh: bool = False,
) -> list[records.Row]:
  """Returns the rows of models under policies, with ratios to plain."""
  run = _Run(target, path, fresh)
  policies = [list_policies(subject.make_task) for subject in subjects]
  _check_patterns(patterns, {p.name for found in policies for p in found})
  for subject, found in zip(subjects, policies, strict=True):
    chosen = [
      p
      for p in found
      if p.name == "plain"
      or any(fnmatch.fnmatch(p.name, pattern) for pattern in patterns)
    ]
    for i, policy in enumerate(chosen, 1):
      run.measure(subject, policy, f"{i} of {len(chosen)}")
    if match:
      run.match_stock(subject)
  return run.list_rows()


def _check_patterns(patterns: list[str], names: set[str]) -> None:
  """Raises if a pattern matches no policy of any model."""
  for pattern in patterns:
    if not fnmatch.filter(names, pattern):
      raise JobError(
        f"`--policies` must match a policy each, of {', '.join(sorted(names))},"
        f" got {pattern!r}."
      )


class _Run:
  """Rows of one run, some of them measured before."""

  def __init__(
    self, target: str, path: str | os.PathLike[str] | None, fresh: bool
  ):
    self._target, self._path, self._fresh = target, path, fresh
    self._kept = read_cases(path)
    self._asked: dict[str, None] = {}

  def list_rows(self) -> list[records.Row]:
    """Returns the rows of what was asked for, in that order."""
    return _join({case: self._kept[case] for case in self._asked})

  def measure(self, subject: Subject, policy: Policy, place: str) -> None:
    """Measures a model under a policy, unless its rows are there."""
    case = f"{subject.name}/{policy.name}"
    if case in self._asked:
      return
    self._asked[case] = None
    rows = [] if self._fresh else self._kept.get(case, [])
    name, target = policy.name, self._target
    known = {
      row.metric: row.value
      for row in rows
      if row.jax == jax.__version__
      and row.machine == describe_stamp(subject, name, row.metric, target)
    }
    if rows and len(known) == len(rows):
      print(f"{case} ({place}): in the file already", flush=True)
      return
    begin = time.monotonic()
    found = _try_policy(policy, target, known)
    figures = f"{_describe(found)}, in {time.monotonic() - begin:.0f} s"
    print(f"{case} ({place}): {figures}", flush=True)
    self._kept[case] = make_rows(subject, name, found, target)
    records.write_rows(self._path, _join(self._kept))

  def match_stock(self, subject: Subject) -> None:
    """Measures the budgets whose FLOPs are those of stock policies."""
    # That is done for stock policies that hold less than ours at their FLOPs.
    # Ours are the fastest, and FLOPs are not all that takes time. So what is
    # left is searched again among those of the fewest FLOPs.
    task = subject.make_task()
    for device in (None, count_flops_alone(self._target)):
      for policy in self._find_losses(subject):
        # A budget for another policy may do.
        if policy not in self._find_losses(subject):
          continue
        most = (1 + tables.EQUAL_SHARE) * self._get_points(subject)[policy][
          "flops"
        ]
        try:
          found = find_budget(task, most, self._target, device)
        # What fails here has failed under every budget, and was reported.
        except Exception:
          continue
        if found is not None:
          self.measure(subject, found, f"at the FLOPs of {policy}")

  def _get_points(self, subject: Subject) -> tables.Points:
    return tables.group_points(self.list_rows()).get(subject.name, {})

  def _find_losses(self, subject: Subject) -> list[str]:
    """Returns the stock policies that hold less than ours at their FLOPs."""
    return [
      loss.policy for loss in tables.find_losses(self._get_points(subject))
    ]


def _join(kept: dict[str, list[records.Row]]) -> list[records.Row]:
  return add_ratios([row for rows in kept.values() for row in rows])


def _try_policy(
  policy: Policy, target: str, known: dict[str, float | str]
) -> Figures | str:
  """Measures a policy; what goes wrong is returned as text."""
  compiled = {metric: known.get(metric) for metric in COMPILED}
  try:
    if all(isinstance(value, float | int) for value in compiled.values()):
      found = Figures(flops=0, step_ms_predicted=0, **compiled)  # type: ignore[arg-type]
      return predict_again(policy, target, found)
    return measure_policy(policy, target)
  # Policies meet models of any kind; the others are to be measured still.
  except Exception as error:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:300]


def _describe(found: Figures | str) -> str:
  if isinstance(found, str):
    return f"none: {found}"
  return (
    f"{found.temp_bytes / 2**20:,.0f} MiB, {found.flops / 1e12:.3f} TFLOP, step"
    f" {found.step_ms_predicted:.1f} ms, trace {found.trace_s:.1f} s, compile"
    f" {found.compile_s:.1f} s"
  )


if __name__ == "__main__":
  shared_flags.run_main(main)
