"""The two passes of a function, for callers who own the loop they run in."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax

from jaxmotion import perfmodel
from jaxmotion.core import PyTree
from jaxmotion.memory.residuals import _traced, choose, run


class Passes:
  """Forward and backward pass of a function of parameters and an input.

  Made by `split_passes`.

  Args:
    traced: the function, traced at its parameters and its input.
    likes: shapes of the parameters and of the input.
  """

  def __init__(self, traced: _traced.TracedFunction, likes: Sequence[PyTree]):
    self._traced = traced
    self._params, self._x = (jax.tree.structure(like) for like in likes)
    self._param_count = len(jax.tree.leaves(likes[0]))

  def residual_names(self) -> list[str]:
    """Returns the names of all residuals that a rule may match."""
    return list(self._traced.residual_names())

  def saved_residuals(self) -> list[choose.Residual]:
    """Returns the residuals whose encoded buffers `forward` returns."""
    return [s.residual for s in self._traced.selection.saved]

  def forward(
    self, params: PyTree, x: PyTree, *, transfer: bool = True
  ) -> tuple[PyTree, list[choose.Buffers]]:
    """Evaluates the function and saves its residuals.

    Args:
      params: parameters of the function.
      x: input of the function.
      transfer: whether to copy offloaded residuals to the host.

    Returns:
      The output, and the encoded buffers of each residual.
    """
    traced = self._traced
    inputs = self._inputs(params, x)
    (outs, _), buffers = run.forward(
      traced.selection, inputs, transfer=transfer
    )
    return traced.fill_result(outs), buffers

  def backward(
    self,
    params: PyTree,
    buffers: list[choose.Buffers],
    ct: PyTree,
    *,
    transfer: bool = True,
  ) -> tuple[PyTree, PyTree]:
    """Computes the cotangents of the parameters and of the input.

    Args:
      params: parameters that `forward` was given.
      buffers: encoded buffers that `forward` returned.
      ct: cotangent of the output.
      transfer: whether offloaded residuals are on the host, to be fetched.

    Returns:
      The cotangents of the parameters and of the input.
    """
    traced = self._traced
    cts = traced.select_cotangents(jax.tree.leaves(ct))
    not_saved = [None] * (len(traced.leaves) - self._param_count)
    inputs = [*self._inputs(params, ()), *not_saved]
    grads = run.backward(
      traced.selection, inputs, buffers, cts, transfer=transfer
    )
    grads = grads[len(traced.closed_over) :]
    return (
      jax.tree.unflatten(self._params, grads[: self._param_count]),
      jax.tree.unflatten(self._x, grads[self._param_count :]),
    )

  def _inputs(self, params: PyTree, x: PyTree) -> list[Any]:
    return [*self._traced.closed_over, *jax.tree.leaves((params, x))]


def split_passes(
  fn: Callable[[PyTree, PyTree], PyTree],
  likes: Sequence[PyTree],
  codec: choose.Action | choose.ResidualRules | choose.ResidualChoice = None,
  *,
  memory_budget: float | None = None,
  device: perfmodel.Device | None = None,
  repeats: int = 1,
) -> Passes:
  """Splits a function of parameters and an input into its two passes.

  Args:
    fn: function (params, x) -> y. The parameters are never saved.
    likes: arrays or shapes of `params` and `x`.
    codec: how residuals are saved, in any form that `compress_residuals` takes.
    memory_budget: most bytes of residuals; see `compress_residuals`.
    device: device whose times are predicted; see `compress_residuals`.
    repeats: number of times it runs before the first backward pass, each with
      residuals of its own.

  Returns:
    The two passes.

  Example:
    >>> import jax.numpy as jnp
    >>> w, x = jnp.full((2, 2), 0.5), jnp.ones((1, 2))
    >>> passes = split_passes(lambda w, x: jnp.sin(x @ w), (w, x))
    >>> y, buffers = passes.forward(w, x)
    >>> ct_w, ct_x = passes.backward(w, buffers, jnp.ones_like(y))
    >>> ct_w.shape, ct_x.shape
    ((2, 2), (1, 2))
  """
  options = choose.make_options(codec, memory_budget, device)
  return Passes(_traced.trace_in_budget(fn, likes, 0, options, repeats), likes)
