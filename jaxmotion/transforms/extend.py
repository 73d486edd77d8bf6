"""Second tier of the transformations: for schemes of one's own and other rooms.

Users of the transformations need none of these names.
"""

from jaxmotion.core import set_public_module as _set_public_module
from jaxmotion.transforms._global_view import differentiate as differentiate
from jaxmotion.transforms._init_state import (
  check_mesh as check_mesh,
  find_maker as find_maker,
  trace_state as trace_state,
)
from jaxmotion.transforms._model_axes import Shardings as Shardings
from jaxmotion.transforms._schemes._fragments import (
  Fragments as Fragments,
  divide_leaves as divide_leaves,
)
from jaxmotion.transforms._schemes._weight_part import (
  GatherOptions as GatherOptions,
  GradientGuard as GradientGuard,
  WeightPart as WeightPart,
)
from jaxmotion.transforms._shard_layout import LeafCut as LeafCut
from jaxmotion.transforms._sharded import (
  PartsLayout as PartsLayout,
  parts_layout as parts_layout,
)
from jaxmotion.transforms._states import (
  DelayedState as DelayedState,
  ExchangedLeaf as ExchangedLeaf,
  ExchangeOptions as ExchangeOptions,
  Options as Options,
  PerWorkerState as PerWorkerState,
  ShardedOptions as ShardedOptions,
  SkipNonfiniteState as SkipNonfiniteState,
  check_trained as check_trained,
  find_exchanges as find_exchanges,
  is_exchange as is_exchange,
)
from jaxmotion.transforms._step._scheme import (
  StepResults as StepResults,
  Workers as Workers,
)

_set_public_module(__name__, globals())
