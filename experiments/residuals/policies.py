"""Policies of saving, stock and ours, each as a training step of a task."""

import bisect
import dataclasses
import functools
import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
from jax.extend import core

from experiments.models import losses
from experiments.residuals import cases, measure
from jaxmotion import codecs, memory, perfmodel

MakeTask = Callable[..., losses.Task]
"""Function that returns a task; a parameter `wrap` is a hook around blocks."""

_BUDGETS = (1, 0.75, 0.5, 0.25, 0)
_SHARES = 32
# Where memory takes no time, the fastest set saves nearly all, and a share of
# its bytes must be stated finer.
_FINE_SHARES = 512
_POLICIES = jax.checkpoint_policies
_STOCK = {
  "nothing": None,
  "dots": _POLICIES.dots_saveable,
  "no_batch": _POLICIES.dots_with_no_batch_dims_saveable,
}


class Policy(NamedTuple):
  """One way to choose what a training step saves."""

  name: str  # Name in rows: "plain", "jax_..." or "ours...".
  # Function without arguments that returns the training step.
  build_step: Callable[[], cases.StepProgram]


def is_ours(name: str) -> bool:
  """Says whether a policy is one of `compress_residuals`."""
  return name.startswith("ours")


def is_exact(name: str) -> bool:
  """Says whether the gradients under a policy are not rounded."""
  return not name.endswith("bits")


def list_policies(make_task: MakeTask) -> list[Policy]:
  """Lists all policies that a task can be trained under."""
  # Stock policies are those of `jax.checkpoint`: around each block if there is
  # a hook, and around the whole loss. Names are those that the loss gives by
  # `checkpoint_name`: each alone, all together, and all but one.
  task = make_task()
  has_hook = "wrap" in inspect.signature(make_task).parameters
  stock: dict[str, Any] = dict(_STOCK)
  names = list_names(task)
  save_names = _POLICIES.save_only_these_names
  if names:
    stock["names"] = save_names(*names)
  if len(names) > 1:
    stock |= {f"name_{name}": save_names(name) for name in names}
  if len(names) > 2:
    stock |= {
      f"names_but_{name}": save_names(*(n for n in names if n != name))
      for name in names
    }
  wraps = {
    name: functools.partial(jax.checkpoint, policy=policy)
    for name, policy in stock.items()
  }
  found = [Policy("plain", functools.partial(_build_whole, task))]
  if has_hook:
    found += [
      Policy(
        f"jax_block_{name}", functools.partial(_build_blocks, make_task, wrap)
      )
      for name, wrap in wraps.items()
    ]
  # Around the whole loss, names choose the same values as around blocks.
  whole = [n for n in wraps if not has_hook or n in ("dots", "no_batch")]
  found += [
    Policy(
      f"jax_whole_{name}", functools.partial(_build_whole, task, wraps[name])
    )
    for name in whole
  ]
  found.append(Policy("ours", functools.partial(_build_ours, task)))
  found += [make_budget(task, share) for share in _BUDGETS]
  for bits in (8, 4):
    codec = codecs.uniform(bits=bits, block=64)
    found.append(make_coded(task, f"{bits}bits", codec))
  return found


def make_coded(task: losses.Task, name: str, codec: Any) -> Policy:
  """Returns the policy of residuals that a codec encodes."""
  build = functools.partial(_build_ours, task, codec=codec)
  return Policy(f"ours_{name}", build)


def make_budget(
  task: losses.Task, share: float, device: perfmodel.Device | None = None
) -> Policy:
  """Returns the policy of a memory budget."""
  build = functools.partial(
    _build_ours, task, memory_budget=share, device=device
  )
  kind = "" if device is None else "_flops"
  return Policy(f"ours{kind}_budget_{share:g}", build)


def count_flops_alone(target: str) -> perfmodel.Device:
  """Returns a device on which a step takes as long as its FLOPs tell."""
  device = perfmodel.builtin_platform(measure.TARGETS[target]).device
  rate = max(device.matmul_flops_per_s.values())
  return dataclasses.replace(
    device,
    name=f"{device.name}, FLOPs alone",
    matmul_flops_per_s=dict.fromkeys(device.matmul_flops_per_s, rate),
    vector_flops_per_s=rate,
    memory_rate=perfmodel.gbyte_per_s(1e6),
    kernel_s=0.0,
    measured={},
  )


def find_budget(
  task: losses.Task,
  flops: float,
  target: str,
  device: perfmodel.Device | None = None,
) -> Policy | None:
  """Finds the smallest memory budget whose step takes so few FLOPs."""
  steps = _SHARES if device is None else _FINE_SHARES

  def is_within(share: int) -> bool:
    step = make_budget(task, share / steps, device).build_step()
    return measure.predict_figures(step, 0, target).flops <= flops

  shares = range(steps + 1)
  first = bisect.bisect_left(shares, True, key=is_within)
  if first not in shares:
    return None
  return make_budget(task, first / steps, device)


def list_names(task: losses.Task) -> list[str]:
  """Lists the names that a loss gives by `checkpoint_name`, in order."""
  closed = jax.make_jaxpr(task.loss_fn)(task.params, task.batch)
  return list(dict.fromkeys(_walk_names(closed.jaxpr)))


def _walk_names(jaxpr: core.Jaxpr) -> list[str]:
  """Lists names of a program and of the programs inside it."""
  found = []
  for eqn in jaxpr.eqns:
    if eqn.primitive.name == "name":
      found.append(eqn.params["name"])
    for inner in core.jaxprs_in_params(eqn.params):
      found += _walk_names(inner)
  return found


def _build_whole(
  task: losses.Task, wrap: losses.Wrap = lambda fn: fn
) -> cases.StepProgram:
  step = jax.value_and_grad(wrap(task.loss_fn))
  return cases.StepProgram(step, (task.params, task.batch))


def _build_blocks(make_task: MakeTask, wrap: losses.Wrap) -> cases.StepProgram:
  return _build_whole(make_task(wrap=wrap))


def _build_ours(task: losses.Task, **options: Any) -> cases.StepProgram:
  return _build_whole(task, lambda fn: memory.compress_residuals(fn, **options))
