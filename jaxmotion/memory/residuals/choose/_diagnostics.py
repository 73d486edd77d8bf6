"""Diagnostics of a forward pass: overflows and measured sparsity."""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp

from jaxmotion.core import Array


class Diagnostics(NamedTuple):
  """Overflows and measured sparsity of one forward pass.

  Attributes:
    overflows: number of residuals whose nonzeros exceeded the capacity,
      int32[].
    fills: share of nonzeros of the fullest tile, float32[], by the name of a
      sparse residual.
  """

  overflows: Array
  fills: dict[str, Array]

  @classmethod
  def empty(cls) -> Diagnostics:
    """Returns empty diagnostics: no overflow, no measured fill."""
    return cls(jnp.zeros((), jnp.int32), {})

  def merge(self, other: Diagnostics) -> Diagnostics:
    """Returns diagnostics with overflows added and fills merged."""
    return Diagnostics(
      self.overflows + other.overflows, {**self.fills, **other.fills}
    )

  def reduce_iterations(self) -> Diagnostics:
    """Reduces stacks of `lax.scan`: sums overflows, takes the largest fill."""
    fills = {name: jnp.max(fill) for name, fill in self.fills.items()}
    return Diagnostics(jnp.sum(self.overflows, dtype=jnp.int32), fills)
