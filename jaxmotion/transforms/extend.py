"""Second tier of the transformations, for other rooms.

Users of the transformations need none of these names.
"""

from jaxmotion.transforms._exchange_state import (
  ExchangeOptions as ExchangeOptions,
)
from jaxmotion.transforms._trace_state import (
  TracedState as TracedState,
  trace_state as trace_state,
)
