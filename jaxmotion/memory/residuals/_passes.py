"""The two passes of a function, for those who own the loop they run in."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax

from jaxmotion.core import PyTree
from jaxmotion.memory.residuals._traced import TracedFunction
from jaxmotion.memory.residuals.choose import (
  Action,
  Options,
  Residual,
  ResidualChoice,
  ResidualRules,
  make_choice,
)
from jaxmotion.memory.residuals.run import Words, backward, forward


class Passes:
  """A function of parameters and an input, split into its two passes.

  Args:
    traced: the function.
    likes: its parameters and its input, as shapes.
  """

  def __init__(self, traced: TracedFunction, likes: Sequence[PyTree]):
    self._traced = traced
    self._params, self._x = (jax.tree.structure(like) for like in likes)
    self._size = len(jax.tree.leaves(likes[0]))

  def saved_residuals(self) -> list[Residual]:
    """Returns what `forward` keeps the words of."""
    return [k.residual for k in self._traced.split.kept]

  def forward(
    self, params: PyTree, x: PyTree, *, transfer: bool = True
  ) -> tuple[PyTree, list[Words]]:
    """Returns the output and the words that are kept for `backward`.

    Args:
      params: of the function.
      x: its input.
      transfer: whether what is to be on the host is sent there.
    """
    traced = self._traced
    inputs = self._inputs(params, x)
    (outs, _), words = forward(traced.split, inputs, transfer=transfer)
    return jax.tree.unflatten(traced.out_tree, outs), words

  def backward(
    self,
    params: PyTree,
    words: list[Words],
    ct: PyTree,
    *,
    transfer: bool = True,
  ) -> tuple[PyTree, PyTree]:
    """Returns the cotangents of the parameters and of the input.

    Args:
      params: those that `forward` was given.
      words: what it returned.
      ct: cotangent of the output.
      transfer: whether some of them are on the host.
    """
    cts = self._traced.smooth(jax.tree.leaves(ct))
    hidden = [None] * len(self._traced.leaves)
    inputs = [*self._inputs(params, ()), *hidden[self._size :]]
    split = self._traced.split
    grads = backward(split, inputs, words, cts, transfer=transfer)
    grads = grads[len(self._traced.constants) :]
    return (
      jax.tree.unflatten(self._params, grads[: self._size]),
      jax.tree.unflatten(self._x, grads[self._size :]),
    )

  def _inputs(self, params: PyTree, x: PyTree) -> list[Any]:
    return [*self._traced.constants, *jax.tree.leaves((params, x))]


def split_passes(
  fn: Callable[[PyTree, PyTree], PyTree],
  likes: Sequence[PyTree],
  codec: Action | ResidualRules | ResidualChoice = None,
  *,
  recompute: str = "cheap",
) -> Passes:
  """Splits a function of parameters and an input into its two passes.

  Args:
    fn: `fn(params, x) -> y`.
    likes: shapes of `params` and `x`.
    codec: as for `compress_residuals`.
    recompute: as for `compress_residuals`.

  Example:
    >>> import jax.numpy as jnp
    >>> w, x = jnp.full((2, 2), 0.5), jnp.ones((1, 2))
    >>> halves = split_passes(lambda w, x: jnp.sin(x @ w), (w, x))
    >>> y, words = halves.forward(w, x)
    >>> ct_w, ct_x = halves.backward(w, words, jnp.ones_like(y))
    >>> ct_w.shape, ct_x.shape
    ((2, 2), (1, 2))
  """
  options = Options(make_choice(codec), recompute)
  return Passes(TracedFunction(fn, likes, 0, options), likes)
