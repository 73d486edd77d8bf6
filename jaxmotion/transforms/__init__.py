"""Optax transformations that exchange gradients, and data-parallel steps."""

from jaxmotion.core import set_public_module as _set_public_module
from jaxmotion.transforms._bind_mesh import bind_mesh as bind_mesh
from jaxmotion.transforms._clip import (
  clip_by_global_norm as clip_by_global_norm,
)
from jaxmotion.transforms._data_parallel import (
  data_parallel as data_parallel,
)
from jaxmotion.transforms._exchange import exchange as exchange
from jaxmotion.transforms._exchange_state import (
  ExchangeState as ExchangeState,
)
from jaxmotion.transforms._fully_sharded import fully_sharded as fully_sharded
from jaxmotion.transforms._fully_sharded_plan import (
  FullyShardedState as FullyShardedState,
)
from jaxmotion.transforms._gradient_guard import (
  GradientGuard as GradientGuard,
)
from jaxmotion.transforms._init_state import init_state as init_state
from jaxmotion.transforms._local_gradient import (
  local_value_and_grad as local_value_and_grad,
)
from jaxmotion.transforms._local_round import LocalState as LocalState
from jaxmotion.transforms._local_updates import local_updates as local_updates
from jaxmotion.transforms._parallelize_step import (
  parallelize_step as parallelize_step,
)
from jaxmotion.transforms._per_worker import (
  PerWorkerState as PerWorkerState,
  per_worker as per_worker,
)
from jaxmotion.transforms._sharded import sharded as sharded
from jaxmotion.transforms._sharded_update import ShardedState as ShardedState
from jaxmotion.transforms._skip_nonfinite import (
  SkipNonfiniteState as SkipNonfiniteState,
  skip_nonfinite as skip_nonfinite,
)
from jaxmotion.transforms._weight_part import (
  GatherOptions as GatherOptions,
  WeightPart as WeightPart,
  gather_block as gather_block,
  gather_params as gather_params,
)

_set_public_module(__name__, globals())
