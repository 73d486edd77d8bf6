"""A loop that keeps some of what its backward pass needs on the host."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxmotion.core import Array
from jaxmotion.memory._memory_kind import to_device, to_host
from jaxmotion.memory.residuals.choose import Diagnostics, Selection
from jaxmotion.memory.residuals.run._backward import backward
from jaxmotion.memory.residuals.run._forward import forward, plain
from jaxmotion.memory.residuals.run._host_buffers import HostBuffers
from jaxmotion.memory.residuals.trace import is_smooth

Arrays = list[Array]


def run_loop(
  split: Selection,
  words_of: HostBuffers,
  fixed: Sequence[Array],
  start: Sequence[Array],
  rows: Sequence[Array],
  **options: Any,
) -> tuple[tuple[Arrays, Arrays], Diagnostics]:
  """Runs a loop whose turns send what they keep while the next one computes.

  Args:
    split: of a turn: of what is fixed, a row and what is carried.
    words_of: of a turn.
    fixed: the same in all turns.
    start: what is carried into the first.
    rows: one for each turn, stacked.
    **options: of `lax.scan`.

  Returns:
    What is carried out of the last turn, the turns' results stacked, and notes.
  """
  many = len(start)
  scan: Any = functools.partial(lax.scan, **options)

  @jax.custom_vjp
  def run(fixed: Arrays, start: Arrays, rows: Arrays) -> Any:
    def turn(carry: Arrays, row: Arrays) -> Any:
      outs, notes = plain(split, [*fixed, *row, *carry])
      return outs[:many], (outs[many:], notes)

    return scan(turn, start, rows)

  def keep(fixed: Arrays, start: Arrays, rows: Arrays) -> Any:
    beside = fixed, start, rows

    def turn(state: Any, row: Arrays) -> Any:
      carry, before = state
      inputs = [*fixed, *row, *carry]
      (outs, notes), words = forward(split, inputs, transfer=False)
      here, there = words_of.pack(words, beside)
      return (outs[:many], there), (outs[many:], notes, here, to_host(before))

    begin = start, words_of.zeros(beside)
    (carry, last), (ys, notes, here, there) = scan(turn, begin, rows)
    return (carry, (ys, notes)), (fixed, rows, last, here, there)

  def pull(kept: Any, cotangents: Any) -> Any:
    fixed, rows, last, here, there = kept
    ct_carry, (ct_ys, _) = cotangents

    def turn(state: Any, own: Any) -> Any:
      ct, sums, far = state
      row, ct_y, near, before = own
      before = to_device(before)
      words = words_of.merge(near, far)
      inputs = [*fixed, *row, *([None] * many)]
      grads = backward(split, inputs, words, [*ct, *ct_y], transfer=False)
      first, second = len(fixed), len(fixed) + len(rows)
      added = zip(sums, _present(grads[:first]), strict=True)
      sums = [a + b for a, b in added]
      state = _present(grads[second:]), sums, words_of.unpack(before)
      return state, _present(grads[first:second])

    zeros = [jnp.zeros_like(a) for a in _smooth(fixed)]
    begin = _smooth(ct_carry), zeros, words_of.unpack(last)
    turns = rows, _smooth(ct_ys), here, there
    backwards = not options.get("reverse", False)
    (ct, sums, _), of_rows = scan(turn, begin, turns, reverse=backwards)
    return _spread(sums, fixed), _spread(ct, start), _spread(of_rows, rows)

  run.defvjp(keep, pull)
  carry, (ys, notes) = run(list(fixed), list(start), list(rows))
  return (carry, ys), notes.over_steps()


def _smooth(arrays: Sequence[Any]) -> list[Any]:
  return [a for a in arrays if is_smooth(a)]


def _present(gradients: Sequence[Any]) -> list[Any]:
  return [g for g in gradients if g is not None]


def _spread(gradients: Sequence[Array], of: Sequence[Array]) -> list[Any]:
  """With None for what has no gradient."""
  given = iter(gradients)
  return [next(given) if is_smooth(a) else None for a in of]
