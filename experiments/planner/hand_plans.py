"""Plans made by hand beside `planner.fit_memory`, and their compiled bytes."""

import hashlib
import math
import os
import pathlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax

from experiments.common import console, records
from experiments.models import losses
from experiments.residuals import cases, measure, policies
from jaxmotion import codecs, memory, perfmodel, planner, program


class CompiledStep(NamedTuple):
  """Figures of a compiled step."""

  device_bytes: int  # All bytes that the device must hold.
  compile_s: float  # Processor seconds of the compilation.


class CompileStore:
  """Compiles steps for a device, each program once.

  A program's key is its text before compilation, so a figure holds whichever
  plan the program came from, and after any change that leaves the text.
  """

  def __init__(self, target: str, path: str | os.PathLike[str] | None = None):
    self._target = target
    self._path = None if path is None else pathlib.Path(path)
    self._known: dict[str, CompiledStep] = {}
    for line in records.read_lines(self._path) if self._path else []:
      if set(line) != {"key", *CompiledStep._fields}:
        raise console.JobError(
          f"{str(path)!r} must hold what `planner.memory` compiled, got a line"
          f" of {', '.join(line) or 'nothing'}."
        )
      key = line.pop("key")
      self._known[key] = CompiledStep(**line)
    # Steps that were asked for, and processor seconds that compilations of
    # known programs took once.
    self.count, self.known_s = 0, 0.0

  def compile(self, step: cases.StepProgram) -> CompiledStep:
    """Returns the figures of a step, compiled unless it is known."""
    self.count += 1
    lowered = measure.lower_traced(
      measure.trace_step(step, self._target), self._target
    )
    about = f"{self._target} {jax.__version__}\n"
    text = about + lowered.as_text()
    key = hashlib.sha256(text.encode()).hexdigest()[:24]
    if key in self._known:
      self.known_s += self._known[key].compile_s
      return self._known[key]
    begin = measure.processor_seconds()
    nbytes = program.device_bytes(lowered.compile().memory_analysis())
    found = CompiledStep(nbytes, measure.processor_seconds() - begin)
    self._known[key] = found
    if self._path is not None:
      lines = [{"key": k, **f._asdict()} for k, f in self._known.items()]
      # A line that a full disk cuts off would make the file unreadable.
      records.write_lines(self._path, lines)
    return found


OPTIONS = {
  "exact": (memory.offload(), memory.recompute()),
  "rounded": (
    codecs.uniform(bits=8, block=64),
    codecs.uniform(bits=4, block=64),
    memory.offload(),
    memory.recompute(),
  ),
}
"""Options of `fit_memory` by name."""

# Budgets of `compress_residuals`, beside those of `list_policies`.
_SHARES = (0.9, 0.6, 0.4, 0.3, 0.15, 0.05)
_INT8 = codecs.uniform(bits=8, block=64)


class HandPlan(NamedTuple):
  """A plan made by hand, with its prediction."""

  policy: policies.Policy  # The plan.
  step_s: float  # Predicted seconds of a step.
  device_bytes: float  # Predicted bytes on the device.


class HandPlans:
  """The plans made by hand for a model, the fastest first."""

  # What is predicted to take more than this share of a budget does not fit.
  _MOST_SHARE = 1.15

  def __init__(
    self, model: str, options: str, target: str, store: CompileStore | None
  ):
    self.model, self.options, self.target = model, options, target
    self.store, self._compiled = store, dict[str, int]()
    self.task = losses.parse_task(model)()
    found = _predict_plans(model, options == "exact", target)
    self.plans = sorted(found, key=lambda plan: plan.step_s)

  def find_bytes(self, plan: HandPlan) -> float:
    """Returns the bytes of a plan, compiled unless predictions are trusted."""
    if self.store is None:
      return plan.device_bytes
    name = plan.policy.name
    if name not in self._compiled:
      step = plan.policy.build_step()
      self._compiled[name] = self.store.compile(step).device_bytes
      ratio = plan.device_bytes / self._compiled[name]
      print(
        f"  by hand: {name}: {1e3 * plan.step_s:.1f} ms, compiled "
        f"{self._compiled[name] / 1e9:.3f} GB, predicted {ratio - 1:+.1%}",
        flush=True,
      )
    return self._compiled[name]

  def known_bytes(self, plan: HandPlan) -> float | None:
    """Returns the compiled bytes of a plan; None if it was not compiled."""
    return self._compiled.get(plan.policy.name)

  def find_fastest(self, budget: float, most_s: float) -> HandPlan | None:
    """Returns the fastest plan that fits."""
    # `most_s`: seconds of the step that plans are compared with. Plans that
    # take longer are not compiled: the first of them that is predicted to fit
    # stands for all.
    for plan in self.plans:
      nbytes = plan.device_bytes
      may_fit = nbytes <= self._MOST_SHARE * budget
      if plan.step_s < most_s and may_fit:
        nbytes = self.find_bytes(plan)
      if nbytes <= budget:
        return plan
    return None


def _predict_plans(model: str, exact: bool, target: str) -> Iterator[HandPlan]:
  """Yields the plans, predicted by the model of `fit_memory`."""
  make_task = losses.parse_task(model)
  task = make_task()
  chosen = policies.list_policies(make_task)
  chosen += [policies.make_budget(task, share) for share in _SHARES]
  chosen += [
    _make_ours(task, f"name_{name}", codec=memory.save_only_these_names(name))
    for name in policies.list_names(task)
  ]
  options: dict[str, dict[str, Any]] = {
    "offload": {"codec": memory.offload()},
    "offload_8bits": {"codec": memory.offload(_INT8)},
    "budget_0.5_8bits": {"codec": _INT8, "memory_budget": 0.5},
  }
  chosen += [_make_ours(task, name, **own) for name, own in options.items()]
  for policy in chosen:
    if exact and not policies.is_exact(policy.name):
      continue
    own = options.get(policy.name.removeprefix("ours_"), {})
    try:
      step = policy.build_step()
      found = measure.predict_figures(step, 0, target)
    except ValueError as error:
      # Nothing that the gradient needs has the name.
      if not policies.is_ours(policy.name) or "must match" not in str(error):
        raise
      continue
    waiting_s = _predict_waiting(task, own, found.step_s, target) if own else 0
    yield HandPlan(policy, found.step_s + waiting_s, found.peak_bytes)


def _make_ours(task: losses.Task, name: str, **options: Any) -> policies.Policy:
  def build() -> cases.StepProgram:
    fn = memory.compress_residuals(task.loss_fn, **options)
    return cases.StepProgram(jax.value_and_grad(fn), (task.params, task.batch))

  return policies.Policy(f"ours_{name}", build)


def _predict_waiting(
  task: losses.Task, options: Mapping[str, Any], step_s: float, target: str
) -> float:
  """Returns the seconds of transfers that do not hide."""
  # As in `fit_memory`, every array is a transfer; those to the host hide behind
  # the forward pass, here a third of the step, the others behind the rest.
  found = memory.residuals_of(task.loss_fn, task.params, task.batch, **options)
  moved = [r for r in found if r.on_host]
  platform = perfmodel.builtin_platform(measure.TARGETS[target])
  waiting_s = 0.0
  for link, share in ((platform.to_host, 1 / 3), (platform.from_host, 2 / 3)):
    assert link is not None
    link_s = sum(
      r.repeats * link.transfer_seconds(r.encoded_bytes) for r in moved
    )
    waiting_s += max(0.0, link_s - share * step_s)
  return waiting_s


class MemoryFit(NamedTuple):
  """A plan for a model and a budget, beside the best plan made by hand."""

  model: str  # Name of the model.
  options: str  # Name of the options.
  budget_bytes: float  # The budget.
  plan: planner.MemoryPlan | None  # The plan; None if there is none.
  least_bytes: float | None  # Least bytes of any plan; None with `plan`.
  # Fastest plan made by hand that fits; None if none does.
  by_hand: HandPlan | None
  # Compiled bytes of that plan; None if it was not compiled.
  hand_bytes: float | None
  hand_count: int  # Number of plans made by hand.
  compilations: int  # Programs that `fit_memory` compiled.
  fit_s: float  # Processor seconds that it took.


def fit_model(hand: HandPlans, depths: Sequence[float]) -> Iterator[MemoryFit]:
  """Yields the plans of a model for several budgets."""
  task, store = hand.task, hand.store
  platform = perfmodel.builtin_platform(measure.TARGETS[hand.target])
  smallest = min(hand.plans, key=lambda p: p.device_bytes)
  plain_plan = next(p for p in hand.plans if p.policy.name == "plain")
  plain = hand.find_bytes(plain_plan)
  least = hand.find_bytes(smallest)

  def measure_memory(fn: Any, *args: Any) -> int:
    assert store is not None
    return store.compile(cases.StepProgram(fn, args)).device_bytes

  for depth in depths:
    budget = plain ** (1 - depth) * least**depth
    counted = (store.count, store.known_s) if store else (0, 0.0)
    begin = measure.processor_seconds()
    plan, least_bytes = None, None
    try:
      plan = planner.fit_memory(
        task.loss_fn,
        task.params,
        (task.batch,),
        platform,
        budget,
        options=OPTIONS[hand.options],
        measure_memory=measure_memory if store else None,
        progress=lambda line: print(f"  {line}", flush=True),
      )
    except planner.BudgetTooSmallError as error:
      least_bytes = error.least_bytes
    fit_s = measure.processor_seconds() - begin
    count = 0
    if store is not None:
      count = store.count - counted[0]
      fit_s += store.known_s - counted[1]
    most_s = plan.step_s if plan else math.inf
    by_hand = hand.find_fastest(budget, most_s)
    yield MemoryFit(
      hand.model,
      hand.options,
      budget,
      plan,
      least_bytes,
      by_hand,
      hand.known_bytes(by_hand) if by_hand else None,
      len(hand.plans),
      count,
      fit_s,
    )
