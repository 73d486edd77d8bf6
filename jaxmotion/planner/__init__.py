"""Which codec, where, and when to compress nothing.

`advise` looks for the codecs that make the predicted step shortest within a
budget of error, `fit` for what to do with each residual under a budget of
memory; both say why. Nothing here is measured or run but what the caller
measured; nothing else imports it.
"""

from jaxmotion.planner._advise import (
  CANDIDATES as CANDIDATES,
  advise as advise,
)
from jaxmotion.planner._fit import fit as fit, program_bytes as program_bytes
from jaxmotion.planner._fit_plan import (
  DoesNotFit as DoesNotFit,
  FitPlan as FitPlan,
  FitRow as FitRow,
)
from jaxmotion.planner._plan import Choice as Choice, Plan as Plan
from jaxmotion.planner._replan import replan as replan
from jaxmotion.planner._text import brief as brief
