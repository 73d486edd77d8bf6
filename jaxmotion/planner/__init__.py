"""Which codec, where, and when to compress nothing.

`advise` looks for the codecs that make the predicted step shortest within a
budget of error, `fit` for what to do with each residual under a budget of
memory; both say why. Nothing here is measured or run but what the caller
measured; nothing else imports it.
"""

from jaxmotion.planner._text import brief as brief
from jaxmotion.planner.exchange import (
  CANDIDATES as CANDIDATES,
  Choice as Choice,
  Plan as Plan,
  advise as advise,
  replan as replan,
)
from jaxmotion.planner.residuals import (
  DoesNotFit as DoesNotFit,
  FitPlan as FitPlan,
  FitRow as FitRow,
  fit as fit,
  program_bytes as program_bytes,
)
