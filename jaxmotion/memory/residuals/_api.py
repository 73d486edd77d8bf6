"""Functions that keep little for their backward pass."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Sequence
from typing import Any

import jax

from jaxmotion.core import PyTree, check_choice
from jaxmotion.memory.residuals._actions import (
  Action,
  Choice,
  Rules,
  choice,
)
from jaxmotion.memory.residuals._residual import Residual
from jaxmotion.memory.residuals._split import Options
from jaxmotion.memory.residuals._traced import Traced


def compress_residuals(
  fn: Callable[..., PyTree],
  codec: Action | Rules | Choice = None,
  *,
  params: int | Sequence[int] = 0,
  recompute: str = "cheap",
  count_overflows: bool = False,
) -> Callable[..., PyTree]:
  """doc."""
  choose = choice(codec)
  check_choice("recompute", recompute, ("cheap", "all"))

  @functools.wraps(fn)
  def wrapped(*args: PyTree, **kwargs: Any) -> PyTree:
    bound = functools.partial(fn, **kwargs)
    traced = Traced(bound, args, params, Options(choose, recompute))
    _check_rules(codec, traced)
    result, notes = traced()
    return (result, notes.overflows) if count_overflows else result

  return wrapped


def residuals_of(
  fn: Callable[..., PyTree],
  *args: PyTree,
  codec: Action | Rules | Choice = None,
  params: int | Sequence[int] = 0,
  recompute: str = "cheap",
) -> list[Residual]:
  """doc."""
  found: list[Residual] = []

  def trace(*args: PyTree) -> None:
    traced = Traced(fn, args, params, Options(choice(codec), recompute))
    found.extend(traced.residuals())

  jax.eval_shape(trace, *args)
  return found


def _check_rules(codec: Any, traced: Traced) -> None:
  if not isinstance(codec, list | tuple):
    return
  kept = [r.name for r in traced.residuals()]
  again = traced.computed_again()
  for pattern, _ in codec:
    if not any(re.search(pattern, name) for name in kept + again):
      listed = ", ".join(map(repr, kept))
      raise ValueError(
        f"`codec` must have rules that match a residual each, got {pattern!r}, "
        f"which matches none of {listed or 'no residuals'}."
      )
