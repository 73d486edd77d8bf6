"""Plans made by hand: what each takes, predicted and compiled."""

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import jax

from experiments.models import losses
from experiments.planner import compile_store
from experiments.residuals import cases, measure
from experiments.residuals.policies import (
  Policy,
  is_exact,
  is_ours,
  list_names,
  list_policies,
  make_budget,
)
from jaxmotion import codecs, memory, perfmodel

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
  """A plan made by hand, with its prediction.

  Attributes:
    policy: the plan.
    step_s: predicted seconds of a step.
    device_bytes: predicted bytes on the device.
  """

  policy: Policy
  step_s: float
  device_bytes: float


class HandPlans:
  """The plans made by hand for a model, the fastest first.

  Args:
    model: name of the model and its options, as `parse_task` takes them.
    options: key of `OPTIONS`; with "exact", plans that round are left out.
    target: device to predict for, a key of `measure.TARGETS`.
    store: compiler of their steps; None trusts the predictions.

  Attributes:
    task: the model's loss and its arguments.
    plans: the plans.
  """

  # What is predicted to take more than this share of a budget does not fit.
  _MOST_SHARE = 1.15

  def __init__(
    self,
    model: str,
    options: str,
    target: str,
    store: compile_store.CompileStore | None,
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

  def find_plan(self, name: str) -> HandPlan:
    """Returns the plan of a name."""
    return next(p for p in self.plans if p.policy.name == name)

  def find_fastest(self, budget: float, most_s: float) -> HandPlan | None:
    """Returns the fastest plan that fits."""
    # Plans that take longer than `most_s` are not compiled: the first of them
    # that is predicted to fit stands for all.
    # `most_s`: seconds of the step that plans are compared with.
    for plan in self.plans:
      nbytes = plan.device_bytes
      may_fit = nbytes <= self._MOST_SHARE * budget
      if plan.step_s < most_s and may_fit:
        nbytes = self.find_bytes(plan)
      if nbytes <= budget:
        return plan
    return None

  def list_errors(self) -> list[float]:
    """Returns how far predicted bytes of all plans are off; compiles them."""
    return [p.device_bytes / self.find_bytes(p) - 1 for p in self.plans]


def _predict_plans(model: str, exact: bool, target: str) -> Iterator[HandPlan]:
  """Yields the plans, predicted by the model of `fit_memory`."""
  make_task = losses.parse_task(model)
  task = make_task()
  policies = list_policies(make_task)
  policies += [make_budget(task, share) for share in _SHARES]
  policies += [
    _make_ours(task, f"name_{name}", codec=memory.save_only_these_names(name))
    for name in list_names(task)
  ]
  options: dict[str, dict[str, Any]] = {
    "offload": {"codec": memory.offload()},
    "offload_8bits": {"codec": memory.offload(_INT8)},
    "budget_0.5_8bits": {"codec": _INT8, "memory_budget": 0.5},
  }
  policies += [_make_ours(task, name, **own) for name, own in options.items()]
  for policy in policies:
    if exact and not is_exact(policy.name):
      continue
    own = options.get(policy.name.removeprefix("ours_"), {})
    try:
      step = policy.build_step()
      found = measure.predict_figures(step, 0, target)
    except ValueError as error:
      # Nothing that the gradient needs has the name.
      if not is_ours(policy.name) or "must match" not in str(error):
        raise
      continue
    waiting_s = _predict_waiting(task, own, found.step_s, target) if own else 0
    yield HandPlan(policy, found.step_s + waiting_s, found.peak_bytes)


def _make_ours(task: losses.Task, name: str, **options: Any) -> Policy:
  def build() -> cases.StepProgram:
    fn = memory.compress_residuals(task.loss_fn, **options)
    return cases.StepProgram(jax.value_and_grad(fn), (task.params, task.batch))

  return Policy(f"ours_{name}", build)


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
