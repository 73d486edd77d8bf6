"""Shares of the work for workers of unequal speed.

A training step takes them as `step(state, batch, counts=shares.counts)`.
"""

from jaxmotion.core import set_public_module as _set_public_module
from jaxmotion.hetero._rebalance import (
  RebalanceState as RebalanceState,
  rebalance as rebalance,
)
from jaxmotion.hetero._shares import (
  assign_microbatches as assign_microbatches,
  fit_speed as fit_speed,
  ideal_shares as ideal_shares,
  integer_shares as integer_shares,
  makespan_s as makespan_s,
)

_set_public_module(__name__, globals())
