"""Chooses an action for every residual under a memory budget."""

from jaxmotion.planner.residuals._fit import (
  fit_memory as fit_memory,
  program_memory_bytes as program_memory_bytes,
)
from jaxmotion.planner.residuals._plan import (
  BudgetTooSmallError as BudgetTooSmallError,
  MemoryPlan as MemoryPlan,
  MemoryPlanRow as MemoryPlanRow,
)
