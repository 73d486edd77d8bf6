"""Traces a function with its backward pass and describes the values."""

from jaxmotion.memory.residuals.trace._bits import (
  pack as pack,
  unpack as unpack,
)
from jaxmotion.memory.residuals.trace._joint import (
  JointProgram as JointProgram,
  is_smooth as is_smooth,
  trace_joint as trace_joint,
)
from jaxmotion.memory.residuals.trace._kinds import (
  kinds as kinds,
  names as names,
)
from jaxmotion.memory.residuals.trace._max_pool import (
  evaluate_max_pool as evaluate_max_pool,
  is_max_pool as is_max_pool,
)
