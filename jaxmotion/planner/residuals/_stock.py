"""Policies of `jax.checkpoint`, as ways to save a function's residuals."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax

from jaxmotion import program
from jaxmotion.planner.residuals import _recipe

_POLICIES = jax.checkpoint_policies
# "" is none: nothing is saved.
_PLAIN_POLICIES = (
  "",
  "everything_saveable",
  "dots_saveable",
  "dots_with_no_batch_dims_saveable",
)
# Names given by `checkpoint_name` that are tried alone; the first ones.
_MOST_NAMES = 8


class Landmarks(NamedTuple):
  """Names and loops of a program, for policies.

  Attributes:
    names: names given by `checkpoint_name`.
    has_loops: whether it has scans.
  """

  names: tuple[str, ...]
  has_loops: bool


def find_landmarks(jaxpr: Any) -> Landmarks:
  """Finds the names and the loops of a program."""
  names: dict[str, None] = {}
  has_loops = False
  for step in program.flatten(jaxpr).steps:
    has_loops |= step.name == "scan"
    if step.name == "name":
      names[step.params["name"]] = None
    for inner in program.inner_jaxprs(step.eqn):
      names.update(dict.fromkeys(find_landmarks(inner).names))
  return Landmarks(tuple(names), has_loops)


def list_stock_recipes(landmarks: Landmarks) -> Iterator[_recipe.Recipe]:
  """Yields `jax.checkpoint` by each policy, of the whole and of loop bodies."""
  for name in _PLAIN_POLICIES:
    policy = getattr(_POLICIES, name) if name else None
    yield _make_stock(name, policy, False)
    if landmarks.has_loops:
      yield _make_stock(name, policy, True)


def list_name_recipes(landmarks: Landmarks) -> Iterator[_recipe.Recipe]:
  """Yields `jax.checkpoint` by policies of names."""
  # If there are loops, their bodies alone are wrapped.
  for name, policy in _list_name_policies(landmarks.names):
    yield _make_stock(name, policy, landmarks.has_loops)


def list_offload_recipes(landmarks: Landmarks) -> Iterator[_recipe.Recipe]:
  """Yields `jax.checkpoint` by policies that save on the host."""
  # Only arrays of loop bodies are listed. Outside of loops, XLA sends such
  # arrays when the backward pass reads them, so that they take as much memory
  # as before.
  if not landmarks.has_loops:
    return
  places = ("device", "pinned_host")
  products = _POLICIES.offload_dot_with_no_batch_dims(*places)
  yield _make_stock("offload_dot_with_no_batch_dims", products, True, True)
  if landmarks.names:
    shown = ", ".join(map(repr, landmarks.names))
    only = _POLICIES.save_and_offload_only_these_names(
      names_which_can_be_saved=[],
      names_which_can_be_offloaded=list(landmarks.names),
      offload_src=places[0],
      offload_dst=places[1],
    )
    words = f"save_and_offload_only_these_names(offloaded: {shown})"
    yield _make_stock(words, only, True, True)


def _make_stock(
  name: str,
  policy: _recipe.Policy | None,
  in_loops: bool,
  is_on_host: bool = False,
) -> _recipe.Recipe:
  words = f"jax.checkpoint(policy={name})" if name else "jax.checkpoint"
  if in_loops:
    words += " of loop bodies"
  return _recipe.Recipe(
    words, "stock", policy=policy, in_loops=in_loops, is_on_host=is_on_host
  )


def _list_name_policies(
  names: Sequence[str],
) -> Iterator[tuple[str, _recipe.Policy]]:
  if names:
    shown = ", ".join(map(repr, names))
    only = _POLICIES.save_only_these_names(*names)
    yield f"save_only_these_names({shown})", only
    no_batch = _POLICIES.dots_with_no_batch_dims_saveable
    both = _POLICIES.save_from_both_policies(no_batch, only)
    yield f"save_from_both_policies(no batch dims, {shown})", both
  for name in names[:_MOST_NAMES]:
    others = [other for other in names if other != name]
    if others:
      yield (
        f"save_only_these_names({name!r})",
        _POLICIES.save_only_these_names(name),
      )
      shown = ", ".join(map(repr, others))
      only = _POLICIES.save_only_these_names(*others)
      yield f"save_only_these_names({shown})", only
    but = _POLICIES.save_anything_except_these_names(name)
    yield f"save_anything_except_these_names({name!r})", but
