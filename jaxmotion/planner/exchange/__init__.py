"""Chooses a codec and a collective for every tensor of an exchange."""

from jaxmotion.planner.exchange._advise import (
  CANDIDATES as CANDIDATES,
  advise as advise,
)
from jaxmotion.planner.exchange._plan import (
  ExchangePlan as ExchangePlan,
  TensorChoice as TensorChoice,
)
from jaxmotion.planner.exchange._replan import replan as replan
