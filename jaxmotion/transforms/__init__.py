"""Optax transformations that exchange gradients, and data-parallel steps."""

from jaxmotion.core import set_public_module as _set_public_module
from jaxmotion.transforms._bind_mesh import bind_mesh as bind_mesh
from jaxmotion.transforms._clip import (
  clip_by_global_norm as clip_by_global_norm,
)
from jaxmotion.transforms._delayed import delayed as delayed
from jaxmotion.transforms._exchange import (
  DelayedState as DelayedState,
  ExchangeState as ExchangeState,
  exchange as exchange,
)
from jaxmotion.transforms._init_state import init_state as init_state
from jaxmotion.transforms._local_gradient import (
  local_value_and_grad as local_value_and_grad,
)
from jaxmotion.transforms._per_worker import (
  PerWorkerState as PerWorkerState,
  per_worker as per_worker,
)
from jaxmotion.transforms._skip_nonfinite import (
  SkipNonfiniteState as SkipNonfiniteState,
  skip_nonfinite as skip_nonfinite,
)
from jaxmotion.transforms._states import (
  FullyShardedState as FullyShardedState,
  LocalState as LocalState,
  ShardedState as ShardedState,
)
from jaxmotion.transforms.local._local_updates import (
  local_updates as local_updates,
)
from jaxmotion.transforms.parts._fully_sharded import (
  fully_sharded as fully_sharded,
  read_params as read_params,
)
from jaxmotion.transforms.parts._sharded import sharded as sharded
from jaxmotion.transforms.parts._weight_part import (
  GatherOptions as GatherOptions,
  GradientGuard as GradientGuard,
  WeightPart as WeightPart,
  gather_block as gather_block,
  gather_params as gather_params,
)
from jaxmotion.transforms.step._parallelize_step import (
  parallelize_step as parallelize_step,
)
from jaxmotion.transforms.step._scheme import (
  Scheme as Scheme,
  StepResults as StepResults,
  TrainState as TrainState,
  Workers as Workers,
)
from jaxmotion.transforms.step._train_step import (
  TrainStep as TrainStep,
  make_train_step as make_train_step,
)

_set_public_module(__name__, globals())
