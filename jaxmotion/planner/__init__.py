"""Which codec, where, and when to compress nothing.

`advise` looks for the codecs that make the predicted step shortest within a
budget of error, `fit_memory` for what to do with each residual under a budget
of memory; both say why. Nothing here is measured or run but what the caller
measured; nothing else imports it.
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
