"""Assumptions of algorithms about a loss, and the losses that break them."""

from __future__ import annotations

import jax

from jaxmotion.planner.exchange import _algorithm_choice, _problem


def refuse_moments(problem: _problem.ExchangeProblem) -> str:
  """Says that the optimizer has a momentum as well, or nothing."""
  # Moments of 8 bits are a quarter of the parameters; counters are nothing.
  if (
    problem.step_cost.state_bytes < _algorithm_choice.params_bytes(problem) / 8
  ):
    return ""
  return (
    "It has the momentum inside and assumes SGD without one after it, but "
    "`optimizer` keeps moments."
  )


def refuse_lookups(problem: _problem.ExchangeProblem, *, why: str) -> str:
  """Says that the loss looks rows of a table up, or nothing."""
  tables = problem.step_cost.uses.looked_up
  if not tables:
    return ""
  return f"{why}, but the loss only looks up rows of `{tables[0]}`."


def refuse_stacks(problem: _problem.ExchangeProblem) -> str:
  """Says that the loss stacks matrices in one array, or nothing."""
  named = jax.tree.leaves_with_path(problem.step_cost.params)
  deep = {
    jax.tree_util.keystr(p, simple=True, separator="/")
    for p, a in named
    if a.ndim > 2
  }
  stacks = [path for path in problem.step_cost.uses.stacked if path in deep]
  if not stacks:
    return ""
  return (
    "It assumes that an array is one matrix of low rank, but the loss takes "
    f"`{stacks[0]}` apart, a stack of several."
  )


def refuse_no_matrices(problem: _problem.ExchangeProblem) -> str:
  """Says that no parameter is a matrix, or nothing."""
  leaves = jax.tree.leaves(problem.step_cost.params)
  if any(a.ndim == 2 and min(a.shape) > 1 for a in leaves):
    return ""
  return "It assumes matrices, which it orthogonalizes, and `params` has none."
