"""Chooses codecs for exchanges, and actions for residuals, by predicted time.

`advise` finds the codecs of the shortest predicted step within an error budget.
`fit_memory` finds a way to save residuals, so that a step fits into a memory
budget. Both explain every choice. Nothing is run; only `fit_memory`
compiles. No other room imports this one.

`CANDIDATES` are the codecs that `advise` chooses from, unless you name others:

  >>> from jaxmotion import planner
  >>> [planner.format_codec(codec) for codec in planner.CANDIDATES][:2]
  ["cast('bfloat16')", 'uniform(bits=8)']
"""

from jaxmotion.core import set_public_module as _set_public_module
from jaxmotion.planner._text import format_codec as format_codec
from jaxmotion.planner.exchange import (
  CANDIDATES as CANDIDATES,
  ExchangePlan as ExchangePlan,
  TensorChoice as TensorChoice,
  advise as advise,
  replan as replan,
)
from jaxmotion.planner.residuals import (
  BudgetTooSmallError as BudgetTooSmallError,
  MemoryPlan as MemoryPlan,
  MemoryPlanRow as MemoryPlanRow,
  fit_memory as fit_memory,
  program_memory_bytes as program_memory_bytes,
)

_set_public_module(__name__, globals())
