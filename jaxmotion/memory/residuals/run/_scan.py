"""Scan whose iterations send their residuals to the host and fetch them."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxmotion import core
from jaxmotion.core import Array
from jaxmotion.memory import _memory_kind
from jaxmotion.memory.residuals import choose
from jaxmotion.memory.residuals.run import _backward, _forward, _host_buffers

Arrays = list[Array]


def run_scan(
  selection: choose.Selection,
  layout: _host_buffers.HostBuffers,
  consts: Sequence[Array],
  init: Sequence[Array],
  xs: Sequence[Array],
  **options: Any,
) -> tuple[tuple[Arrays, Arrays], choose.Diagnostics]:
  """Runs a scan whose iterations send their residuals to the host."""
  # The host buffers of an iteration are carried to the next one, which sends
  # them while it computes. In the backward pass, an iteration fetches the
  # buffers that the next backward iteration needs, again while it computes. The
  # buffers of the last forward iteration never leave the device: the backward
  # pass begins with them.
  # Before, an iteration sent its buffers at its end and fetched them at its
  # beginning, and so waited for all of its transfers.
  # Returns the last carry, the stacked outputs, and the diagnostics of all
  # iterations.
  carried = len(init)
  scan: Any = functools.partial(lax.scan, **options)

  @jax.custom_vjp
  def run(consts: Arrays, init: Arrays, xs: Arrays) -> Any:
    def iteration(carry: Arrays, x: Arrays) -> Any:
      outs, notes = _forward.evaluate_outputs(selection, [*consts, *x, *carry])
      return outs[:carried], (outs[carried:], notes)

    return scan(iteration, init, xs)

  def run_forward(consts: Arrays, init: Arrays, xs: Arrays) -> Any:
    operands = consts, init, xs

    def iteration(state: Any, x: Arrays) -> Any:
      carry, previous = state
      inputs = [*consts, *x, *carry]
      (outs, notes), buffers = _forward.forward(
        selection, inputs, transfer=False
      )
      device, host = layout.pack(buffers, operands)
      sent = _memory_kind.to_host(previous)
      return (outs[:carried], host), (outs[carried:], notes, device, sent)

    begin = init, layout.zeros(operands)
    (carry, last), (ys, notes, device, host) = scan(iteration, begin, xs)
    return (carry, (ys, notes)), (consts, xs, last, device, host)

  def run_backward(residuals: Any, cotangents: Any) -> Any:
    consts, xs, last, device, host = residuals
    ct_carry, (ct_ys, _) = cotangents

    def iteration(state: Any, row: Any) -> Any:
      ct, const_grads, fetched = state
      x, ct_y, stayed, previous = row
      # Row i of the host stack holds the buffers of the iteration before i,
      # which is the one that runs next: they are for the next iteration.
      previous = _memory_kind.to_device(previous)
      buffers = layout.merge(stayed, fetched)
      inputs = [*consts, *x, *([None] * carried)]
      cts = [*ct, *ct_y]
      grads = _backward.backward(
        selection, inputs, buffers, cts, transfer=False
      )
      first, second = len(consts), len(consts) + len(xs)
      pairs = zip(const_grads, _drop_none(grads[:first]), strict=True)
      const_grads = [a + b for a, b in pairs]
      ct = _drop_none(grads[second:])
      # Unpacked at the end of the iteration, after the last use of its own
      # buffers.
      state = ct, const_grads, layout.unpack(previous)
      return state, _drop_none(grads[first:second])

    zeros = [jnp.zeros_like(a) for a in _drop_integers(consts)]
    begin = _drop_integers(ct_carry), zeros, layout.unpack(last)
    rows = xs, _drop_integers(ct_ys), device, host
    is_reverse = not options.get("reverse", False)
    state, x_grads = scan(iteration, begin, rows, reverse=is_reverse)
    ct, const_grads, _ = state
    return (
      _insert_none(const_grads, consts),
      _insert_none(ct, init),
      _insert_none(x_grads, xs),
    )

  run.defvjp(run_forward, run_backward)
  carry, (ys, notes) = run(list(consts), list(init), list(xs))
  return (carry, ys), notes.reduce_iterations()


def _drop_integers(arrays: Sequence[Any]) -> list[Any]:
  """Returns the arrays that have gradients."""
  return [a for a in arrays if core.is_inexact(a)]


def _drop_none(gradients: Sequence[Any]) -> list[Any]:
  """Returns the gradients that exist."""
  return [g for g in gradients if g is not None]


def _insert_none(
  gradients: Sequence[Array], like: Sequence[Array]
) -> list[Any]:
  """Returns one gradient for each array, None for arrays that have none."""
  given = iter(gradients)
  return [next(given) if core.is_inexact(a) else None for a in like]
