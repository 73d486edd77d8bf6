"""Ways to save the residuals of a function, their costs not yet known."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
from jax import lax

from jaxmotion import core, perfmodel
from jaxmotion.core import Array
from jaxmotion.memory import residuals
from jaxmotion.program import Step, evaluate, flatten, read_operand

Rules = tuple[tuple[str, residuals.Action], ...]
Policy = Callable[..., Any]


class Recipe(NamedTuple):
  """A way to save the residuals of a function.

  Attributes:
    name: words for it, which no other way has.
    kind: "plain" changes nothing, "stock" is `jax.checkpoint`, and "cut" is
      `memory.compress_residuals`.
    rules: rules of a cut.
    memory_budget: share of a cut.
    policy: policy of `jax.checkpoint`.
    in_loops: whether `jax.checkpoint` wraps the bodies of loops, rather than
      the whole function.
    is_on_host: whether the policy saves arrays on the host.
  """

  name: str
  kind: str
  rules: Rules = ()
  memory_budget: float | None = None
  policy: Policy | None = None
  in_loops: bool = False
  is_on_host: bool = False

  def wrap(
    self, fn: Callable[..., Any], count: int, device: perfmodel.Device
  ) -> Callable[..., Any]:
    """Returns the function that saves its residuals this way."""
    if self.kind == "plain":
      return fn
    if self.kind == "cut":
      return residuals.compress_residuals(
        fn, **self._cut_options(count, device)
      )
    if self.in_loops:
      return checkpoint_loops(fn, self.policy)
    return jax.checkpoint(fn, policy=self.policy)

  def list_residuals(
    self, fn: Callable[..., Any], args: Sequence[Any], device: perfmodel.Device
  ) -> list[residuals.Residual]:
    """Returns the residuals that a cut saves; [] for other kinds."""
    if self.kind != "cut":
      return []
    options = self._cut_options(len(args), device)
    return residuals.residuals_of(fn, *args, **options)

  def _cut_options(
    self, count: int, device: perfmodel.Device
  ) -> dict[str, Any]:
    return {
      "codec": self.rules or None,
      "params": tuple(range(count)),
      "memory_budget": self.memory_budget,
      "device": device,
    }


PLAIN = Recipe("plain", "plain")


def make_cut(
  memory_budget: float | None = None, rules: Rules = (), words: str = ""
) -> Recipe:
  """Makes the recipe of a cut.

  Args:
    memory_budget: share of the residuals' bytes.
    rules: actions of residuals.
    words: words for the rules.

  Example:
    >>> make_cut(0.5).name
    'compress_residuals(memory_budget=0.5)'
  """
  parts = [words] if words else []
  if memory_budget is not None:
    parts.append(f"memory_budget={memory_budget:g}")
  name = f"compress_residuals({', '.join(parts)})"
  return Recipe(name, "cut", rules, memory_budget)


def checkpoint_loops(
  fn: Callable[..., Any], policy: Policy | None
) -> Callable[..., Any]:
  """Returns a function whose scans run their bodies under `jax.checkpoint`.

  Args:
    fn: function of arrays.
    policy: policy of `jax.checkpoint`.

  Example:
    >>> import jax.numpy as jnp
    >>> def fn(w, x):
    ...   return jax.lax.scan(lambda x, w: (jnp.sin(w * x), None), x, w)[0]
    >>> wrapped = checkpoint_loops(fn, None)
    >>> "prevent_cse" in str(jax.make_jaxpr(wrapped)(jnp.ones(3), 1.0))
    True
  """

  @functools.wraps(fn)
  def wrapped(*args: Any) -> Any:
    closed, shape = jax.make_jaxpr(fn, return_shape=True)(*args)
    program = flatten(closed)
    env = dict(program.constants)
    env.update(zip(program.inputs, jax.tree.leaves(args), strict=True))
    for step in program.steps:
      if step.name == "scan":
        operands = [read_operand(env, v) for v in step.ins]
        with step.named():
          outs = _scan_checkpointed(step, operands, policy)
        env.update(zip(step.outs, outs, strict=True))
      else:
        evaluate([step], env)
    outs = [read_operand(env, v) for v in program.outputs]
    return jax.tree.unflatten(jax.tree.structure(shape), outs)

  return wrapped


def _scan_checkpointed(
  step: Step, operands: Sequence[Array], policy: Policy | None
) -> list[Array]:
  params = step.params
  jaxpr, count, carried = core.scan_parts(params)
  body = jax.checkpoint(
    core.jax_core.jaxpr_as_fun(jaxpr), policy=policy, prevent_cse=False
  )
  consts, last = operands[:count], count + carried

  def iteration(carry: Any, x: Any) -> Any:
    outs = body(*consts, *carry, *x)
    return outs[:carried], outs[carried:]

  options = {k: params[k] for k in ("length", "reverse", "unroll")}
  init, xs = list(operands[count:last]), list(operands[last:])
  carry, ys = lax.scan(iteration, init, xs, **options)
  return [*carry, *ys]
