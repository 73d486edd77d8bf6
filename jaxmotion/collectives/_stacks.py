"""Stacks of small arrays of one shape, which are reduced as one array."""

from collections.abc import Hashable, Sequence
from typing import Any

import jax

from jaxmotion.collectives import _methods, _pieces, _rounds
from jaxmotion.core import Array, AxisName, PyTree

# A stack copies its arrays. That takes longer than it spares for large ones.
_MAX_SIZE = 1 << 14
_STACKABLE = ("gather", "two_phase")


def find_stacks(
  reductions: Sequence[_methods.Reduction], methods: Sequence[str]
) -> list[list[int]]:
  """Returns the positions of arrays that are reduced together, in order."""
  # Payloads that the network adds up stay apart: to make one is an operation or
  # two. So do arrays of a step of several programs: each is sent as soon as its
  # gradient is there.
  found: dict[Hashable, list[int]] = {}
  for i, (reduction, method) in enumerate(
    zip(reductions, methods, strict=True)
  ):
    key: Hashable = i
    is_small = reduction.x.size <= _MAX_SIZE
    if is_small and method in _STACKABLE and not _pieces.sends_pieces():
      key = (reduction.codec, method, _describe_inputs(reduction))
    found.setdefault(key, []).append(i)
  return list(found.values())


def run_reductions(
  reductions: Sequence[_methods.Reduction],
  methods: Sequence[str],
  axis_name: AxisName,
) -> list[tuple[Array, _methods.ReduceState]]:
  """Runs all reductions together; returns each one's result and new state."""
  stacks = find_stacks(reductions, methods)
  results = _rounds.run_rounds(
    [
      _methods.reduce_stack([reductions[i] for i in stack], methods[stack[0]])
      if len(stack) > 1
      else _methods.reduce_array(reductions[stack[0]], methods[stack[0]])
      for stack in stacks
    ],
    [
      _methods.round_kinds(reductions[stack[0]].codec, methods[stack[0]])
      for stack in stacks
    ],
    axis_name,
  )
  by_position: dict[int, Any] = {}
  for stack, found in zip(stacks, results, strict=True):
    by_position |= zip(stack, found if len(stack) > 1 else [found], strict=True)
  return [by_position[i] for i in range(len(reductions))]


def _describe_inputs(reduction: _methods.Reduction) -> Hashable:
  """Returns the types of a reduction's arrays and the form of its state."""
  inputs: PyTree = (reduction.x, reduction.state, reduction.key)
  leaves, treedef = jax.tree.flatten(inputs)
  return treedef, tuple(jax.typeof(x) for x in leaves)
