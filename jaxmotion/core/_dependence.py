"""Dependence of a function's results on its arguments."""

from collections.abc import Callable
from typing import Any

import jax
from jax.interpreters import partial_eval

from jaxmotion.core._types import PyTree


def find_dependent(
  fun: Callable[..., PyTree], fixed: PyTree, free: PyTree
) -> list[bool]:
  """Says which results of a function may depend on its second argument.

  It traces the function and drops the operations that a result does not need.

  Args:
    fun: (fixed, free) -> pytree of arrays.
    fixed: first argument.
    free: second argument.

  Returns:
    One bool for each leaf of the result.

  >>> find_dependent(lambda a, b: (a + 1, a * b), 1.0, 2.0)
  [False, True]
  """
  program: Any = jax.make_jaxpr(fun)(fixed, free)
  jaxpr = program.jaxpr
  first = len(jax.tree.leaves(fixed))
  dependent = []
  for i in range(len(jaxpr.outvars)):
    wanted = [i == j for j in range(len(jaxpr.outvars))]
    _, used = partial_eval.dce_jaxpr(jaxpr, wanted)
    dependent.append(any(used[first:]))
  return dependent
