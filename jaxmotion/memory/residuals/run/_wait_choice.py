"""Chooses how saved residuals wait for the backward pass."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import jax
import jax.numpy as jnp

from jaxmotion import program
from jaxmotion.memory.residuals import choose
from jaxmotion.memory.residuals.run import _delay, _forward


class WaitChoice:
  """Choice of the residuals that wait without a barrier of their own.

  Args:
    selection: the function and its selected residuals.
    residual: residual of each value that has buffers; may grow.
    on_host: values whose buffers are on the host still; may shrink.
  """

  def __init__(
    self,
    selection: choose.Selection,
    residual: Mapping[program.Value, choose.Residual],
    on_host: Collection[program.Value],
  ):
    self._joint, self._residual = selection.joint, residual
    self._on_host = on_host
    self._free = _delay.find_free_to_delay(selection)
    self._forward_steps: set[int] | None = None

  def _is_written_by_itself(self, value: program.Value) -> bool:
    """Says whether the forward pass has no barrier behind a value's maker."""
    joint = self._joint
    if value in self._free:
      return True
    written = value.source
    maker = joint.order.maker(written)
    return written in joint.outputs or (
      maker is not None and program.is_expensive(maker.eqn)
    )

  def is_free(self, value: program.Value) -> bool:
    """Says whether a value is in memory, or free to delay, outside of loops."""
    residual = self._residual[value]
    return (
      residual.repeats == 1
      and not residual.is_computed
      and value not in self._on_host
      and (value in self._joint.inputs or self._is_written_by_itself(value))
    )

  def repeats(self, steps: Sequence[program.Step]) -> bool:
    """Says whether the forward pass has run any of some steps."""
    if self._forward_steps is None:
      joint = self._joint
      ends = [*joint.outputs, *self._residual]
      run = joint.order.leading_to(ends, dict.fromkeys(joint.inputs))
      self._forward_steps = {id(step) for step in run}
    return any(id(step) in self._forward_steps for step in steps)

  def list_masked(
    self,
    to_decode: Sequence[program.Value],
    steps: Sequence[program.Step],
    whole: Collection[program.Value],
    buffers: Mapping[program.Value, choose.Buffers],
  ) -> set[program.Value]:
    """Returns the residuals that wait without a barrier of their own."""
    # These are arrays in memory that only fusions read. A fusion combines an
    # array with a zero that has passed the barrier, which changes no bit. It
    # may then write its result over the array, and reads a slice of a stack
    # where that is: a barrier in between would keep it from both.
    read_whole = {v.source for v in whole}
    read_whole.update(
      v.source for s in steps if _forward.ends_fusion(s) for v in s.reads
    )
    return {
      v
      for v in to_decode
      if v not in self._on_host
      and v.source not in read_whole
      and self._is_written_by_itself(v)
      and not self._residual[v].is_computed
      and all(
        jnp.issubdtype(b.dtype, jnp.unsignedinteger)
        for b in jax.tree.leaves(buffers[v])
      )
    }
