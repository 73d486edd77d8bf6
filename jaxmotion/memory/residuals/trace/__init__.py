"""Traces a function with its backward pass and describes the values."""

from jaxmotion.memory.residuals.trace._codes import (
  evaluate_max_pool as evaluate_max_pool,
  is_max_pool as is_max_pool,
  pack_codes as pack_codes,
  packed_like as packed_like,
  unpack_codes as unpack_codes,
)
from jaxmotion.memory.residuals.trace._joint import (
  JointProgram as JointProgram,
  Positions as Positions,
  check_effects as check_effects,
  count_bytes as count_bytes,
  is_product as is_product,
  product_operands as product_operands,
  trace_joint as trace_joint,
)
from jaxmotion.memory.residuals.trace._kinds import (
  classify_values as classify_values,
  find_divisors as find_divisors,
  name_values as name_values,
)
