"""Chooses what to do with every residual under a memory budget."""

from jaxmotion.planner.residuals._fit import (
  fit as fit,
  program_bytes as program_bytes,
)
from jaxmotion.planner.residuals._plan import (
  DoesNotFit as DoesNotFit,
  FitPlan as FitPlan,
  FitRow as FitRow,
)
