"""Offers what other rooms and authors of transformations build exchanges with.

Users of the collectives need none of these names.
"""

from jaxmotion.collectives._adaptive import (
  check_level as check_level,
  max_over_workers as max_over_workers,
)
from jaxmotion.collectives._hierarchical import joint_axes as joint_axes
from jaxmotion.collectives._layout import (
  choose_methods as choose_methods,
  is_cut as is_cut,
  row_like as row_like,
  shard_like as shard_like,
)
from jaxmotion.collectives._nonfinite import (
  NONFINITE_POLICIES as NONFINITE_POLICIES,
  all_finite as all_finite,
  apply_nonfinite_policy as apply_nonfinite_policy,
)
