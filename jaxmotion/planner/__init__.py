"""What is done with each residual under a budget of memory."""

from jaxmotion.planner._fit import fit as fit, program_bytes as program_bytes
from jaxmotion.planner._fit_plan import (
  DoesNotFit as DoesNotFit,
  FitPlan as FitPlan,
  FitRow as FitRow,
)
