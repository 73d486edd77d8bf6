"""The residual that each value of a program would be saved as."""

from __future__ import annotations

from collections.abc import Sequence

from jaxmotion import program
from jaxmotion.memory import _memory_kind
from jaxmotion.memory.residuals import trace
from jaxmotion.memory.residuals.choose import _actions, _partition, _residual


class ResidualTable:
  """The residual that each value of a joint program would be saved as.

  Args:
    joint: the function and its backward pass.
    input_names: names of the function's inputs.
    choose: function of a residual that returns its action.
    prefix: prefix of the names of residuals.
    repeats: number of times the function runs.

  Attributes:
    repeats: that number.
  """

  def __init__(
    self,
    joint: trace.JointProgram,
    input_names: Sequence[str],
    choose: _actions.ResidualChoice,
    prefix: str,
    repeats: int,
  ):
    self._joint, self._choose, self.repeats = joint, choose, repeats
    self._kind = trace.classify_values(joint.program)
    self._name = trace.name_values(
      joint.program, input_names, self._kind, prefix
    )
    self._divisors = trace.find_divisors(joint.program)
    self._described: dict[program.Value, _residual.Residual] = {}

  def forward_values(self) -> list[program.Value]:
    """Returns the values that depend on no cotangent."""
    return [v for v in self._name if v not in self._joint.backward]

  def describe_exact(self, value: program.Value) -> _residual.Residual:
    """Returns a value as a residual that no codec rounds."""
    aval = value.aval
    name, kind = self._name[value], self._kind[value]
    shape = tuple(aval.shape)
    return _residual.Residual(
      name,
      kind,
      shape,
      aval.dtype,
      repeats=self.repeats,
      partition=_partition.find_partition(aval),
    )

  def describe(self, value: program.Value) -> _residual.Residual:
    """Returns a value as the residual that it would be saved as."""
    # Arguments of the function cannot be recomputed, so an action that might
    # require that leaves them as they are.
    if value not in self._described:
      exact = residual = self.describe_exact(value)
      # Residuals of an inner scan were already encoded and placed by that
      # scan: leave them as they are. A stack on the host would otherwise be
      # fetched as a whole, then row by row: a transformer of 24 layers in 8
      # bits held 7076 MiB, and 2017 with the stack left where it is.
      if not (_memory_kind.is_on_host(value.aval) or exact.is_of_scan):
        residual = _residual.apply_choice(exact, self._choose)
      if value in self._divisors and residual.may_round_to_zero:
        residual = residual._replace(codec=None)
      needs_recompute = residual.recomputed or residual.may_overflow
      is_argument = value in self._joint.inputs
      self._described[value] = (
        exact if is_argument and needs_recompute else residual
      )
    return self._described[value]
