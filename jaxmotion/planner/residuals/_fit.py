"""Chooses what is done with each residual under a budget of memory."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxmotion.codecs import Codec
from jaxmotion.core import PyTree, shape_string
from jaxmotion.memory.residuals import Action, offload, recompute
from jaxmotion.perfmodel import Platform
from jaxmotion.planner._checks import check_batch, check_platform
from jaxmotion.planner.residuals._costs import ResidualCosts
from jaxmotion.planner.residuals._enumerate import list_candidates
from jaxmotion.planner.residuals._plan import MemoryPlan
from jaxmotion.planner.residuals._select import Check, select_fastest

OPTIONS = (offload(), recompute())


def program_memory_bytes(fn: Callable[..., PyTree], *args: PyTree) -> int:
  """Returns the device memory of a function, compiled for JAX's backend.

  Arguments, results and everything in between. The CPU backend's figure is
  right for what loops keep, and says nothing of residuals outside loops, nor
  of what is on the host.

  Args:
    fn: the function.
    *args: its arguments: pytrees of arrays or of `jax.ShapeDtypeStruct`s.

  Example:
    >>> x = jax.ShapeDtypeStruct((256, 256), "float32")
    >>> program_memory_bytes(lambda x: x + 1, x)
    524288
  """
  memory: Any = jax.jit(fn).lower(*args).compile().memory_analysis()
  return int(
    memory.argument_size_in_bytes
    + memory.output_size_in_bytes
    + memory.temp_size_in_bytes
    - memory.alias_size_in_bytes
  )


def fit_memory(
  fn: Callable[..., Any],
  params: PyTree,
  batch: tuple[Any, ...],
  platform: Platform,
  budget_bytes: float,
  *,
  options: Sequence[Action] = OPTIONS,
  measure_memory: Check | None = program_memory_bytes,
) -> MemoryPlan:
  r"""Chooses what is done with each residual so that a step fits and is short.

  Each residual `r` of a function is kept, encoded, moved to the host or
  computed again, so that the predicted seconds of a step

  .. math::
    t(D) + \sum_r n_r (e_r + d_r)
    + \sum_l \max(0, p_l - f_l) + \max(0, q_l - b_l)

  are least under the budget, where `t(D)` is the roofline of a step that
  computes the residuals `D` again, `n`, `e` and `d` are how often a residual is
  kept and the seconds of encoding and decoding it (and of the device's memory,
  if it goes to the host and comes back), `p` and `q` are the seconds
  that the link to the host and the one back take for a layer (the body of a
  loop, or what is in none), and `f` and `b` those of its forward and backward
  computations.

  Plans that none is both faster and smaller than are tried in turn: the step,
  `jax.value_and_grad` of the function, is compiled, and what the compiler
  needs more or less than predicted moves the choice to another plan until the
  fastest is found that fits. If none does, the plans that keep least are
  compiled, one for each set `D`, before the budget is refused. Nothing is run.

  Args:
    fn: `fn(params, *batch)`, a scalar: any JAX function.
    params: pytree of arrays or of `jax.ShapeDtypeStruct`s.
    batch: tuple of the arguments after `params`: pytrees of arrays or of
      `jax.ShapeDtypeStruct`s.
    platform: what the step will run on.
    budget_bytes: of all device memory: arguments, gradients, residuals and
      what is alive besides. The optimizer's state is the caller's.
    options: what may be done besides keeping: codecs, `offload(...)`s and
      `recompute()`. Codecs that round change the gradients.
    measure_memory: `measure_memory(step, params, *batch)` compiles a step and
      returns the bytes of device memory it takes; None trusts the prediction.

  Returns:
    The plan; `plan.wrap(fn)` keeps its residuals by it.

  Raises:
    BudgetTooSmallError: no plan meets the budget (a ValueError with `least_bytes`).
    TypeError: `platform` is no platform, `batch` is no tuple, or an option is
      none.
    ValueError: the budget is not positive, the function returns no scalar or
      has side effects, a codec remembers something between arrays, or the
      device has no rate for a matrix product's dtype.

  Example:
    >>> from jaxmotion.perfmodel import builtin_platform
    >>> def loss(params, x):
    ...   def layer(x, w):
    ...     return x + jnp.tanh(jnp.tanh(x @ w) @ w.T), None
    ...   return jnp.mean(jax.lax.scan(layer, x, params)[0] ** 2)
    >>> w = jax.ShapeDtypeStruct((8, 64, 64), "float32")
    >>> x = jax.ShapeDtypeStruct((256, 64), "float32")
    >>> plan = fit_memory(loss, w, (x,), builtin_platform("h100_node"), 1.5e6)
    >>> plan.compiled_bytes <= 1.5e6, plan.rules[0][1]
    (True, recompute())

  References:
    Liu et al., Layup: layer-adaptive and multi-type intermediate-oriented
    memory optimization for GPU-based CNNs, 2019 (a rule for each type of
    layer, here a price for each array); Jain et al., Checkmate: breaking the
    memory wall with optimal tensor rematerialization, 2020.
  """
  _check_budget(budget_bytes)
  check_platform(platform)
  check_batch(batch)
  _check_options(options)
  args = jax.tree.map(_shape, (params, *batch))
  _check_result(fn, args)
  refused = _no_host(platform, measure_memory)
  notes: tuple[str, ...] = ()
  if refused and any(isinstance(o, offload) for o in options):
    options = [o for o in options if not isinstance(o, offload)]
    notes = (f"Nothing is offloaded: {refused}.",)
  ways = [o for o in options if not (o is None or isinstance(o, recompute))]
  prices = ResidualCosts(fn, args, platform, ways)
  found = list_candidates(
    prices, any(isinstance(o, recompute) for o in options)
  )
  return select_fastest(prices, found, budget_bytes, measure_memory, notes)


def _shape(x: Any) -> Any:
  aval = jax.typeof(x)
  return jax.ShapeDtypeStruct(aval.shape, aval.dtype)


def _no_host(platform: Platform, measure_memory: Check | None) -> str:
  """Says why nothing may go to the host, if so."""
  if platform.to_host is None or platform.from_host is None:
    return f"`platform` {platform.name!r} has no link to a host"
  if measure_memory is program_memory_bytes and jax.default_backend() == "cpu":
    return (
      "the CPU backend, which the step was compiled for, has no other memory "
      "(`measure_memory` may be a compiler for the platform)"
    )
  return ""


def _check_budget(budget_bytes: float) -> None:
  if isinstance(budget_bytes, bool) or not isinstance(
    budget_bytes, int | float
  ):
    raise TypeError(
      f"`budget_bytes` must be a number of bytes, got {budget_bytes!r}."
    )
  if not (budget_bytes > 0 and math.isfinite(budget_bytes)):
    raise ValueError(
      f"`budget_bytes` must be positive and finite, got {budget_bytes!r}."
    )


def _check_options(options: Sequence[Action]) -> None:
  for option in options:
    if not (option is None or isinstance(option, Codec | offload | recompute)):
      raise TypeError(
        "`options` must be codecs, `offload(...)`, `recompute()` or None, got "
        f"{option!r}."
      )


def _check_result(fn: Callable[..., Any], args: Sequence[PyTree]) -> None:
  result = jax.eval_shape(fn, *args)
  leaves = jax.tree.leaves(result)
  if (
    len(leaves) != 1
    or leaves[0].shape
    or not jnp.issubdtype(leaves[0].dtype, jnp.floating)
  ):
    shown = ", ".join(map(shape_string, leaves))
    raise ValueError(
      f"`fn` must return a floating-point scalar, got ({shown})."
    )
