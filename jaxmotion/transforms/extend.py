"""Second tier of the transformations, for other rooms.

Users of the transformations need none of these names.
"""

from jaxmotion.transforms._exchange_state import (
  ExchangeOptions as ExchangeOptions,
  TracedState as TracedState,
  trace_state as trace_state,
)
