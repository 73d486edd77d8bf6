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
from jaxmotion.memory.residuals.trace._program import (
  Operand as Operand,
  Order as Order,
  Step as Step,
  Value as Value,
  evaluate as evaluate,
  flatten as flatten,
  read as read,
)
from jaxmotion.memory.residuals.trace._recompute_cost import (
  is_discontinuous as is_discontinuous,
  is_exact_equality as is_exact_equality,
  is_expensive as is_expensive,
)
