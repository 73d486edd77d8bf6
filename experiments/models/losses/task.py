"""A training loss with the shapes of its parameters and of its batch."""

from collections.abc import Callable
from typing import Any, NamedTuple

from jaxmotion.core import Array, PyTree

Wrap = Callable[[Callable[..., Any]], Callable[..., Any]]
"""Function of a block that returns what runs in its place."""


class Task(NamedTuple):
  """A loss, and the shapes that it is called with."""

  # Function (params, batch) -> loss.
  loss_fn: Callable[[PyTree, PyTree], Array]
  params: PyTree  # Shapes of the parameters, which gradients are taken of.
  batch: PyTree  # Shapes of everything else.


def run_plain(block: Callable[..., Any]) -> Callable[..., Any]:
  """Returns the block itself: the hook that wraps nothing."""
  return block
