"""Workers of unequal speed: shares, exactly weighted gradients, rebalancing."""

from jaxmotion.hetero._deal import deal as deal
from jaxmotion.hetero._rebalance import (
  RebalanceState as RebalanceState,
  rebalance as rebalance,
)
from jaxmotion.hetero._shares import (
  fit_speed as fit_speed,
  ideal_shares as ideal_shares,
  slowest_s as slowest_s,
  whole_shares as whole_shares,
)
from jaxmotion.hetero._step import (
  Metrics as Metrics,
  Uneven as Uneven,
  UnevenState as UnevenState,
  uneven_data_parallel as uneven_data_parallel,
)
