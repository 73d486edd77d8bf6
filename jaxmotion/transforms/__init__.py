"""Optax transformations that exchange gradients, and data-parallel steps."""

from jaxmotion.core import set_public_module as _set_public_module
from jaxmotion.transforms._exchange import exchange as exchange
from jaxmotion.transforms._global_view import (
  grad as grad,
  value_and_grad as value_and_grad,
)
from jaxmotion.transforms._init_state import (
  bind_mesh as bind_mesh,
  init_state as init_state,
)
from jaxmotion.transforms._schemes._fully_sharded import (
  fully_sharded as fully_sharded,
  read_params as read_params,
)
from jaxmotion.transforms._schemes._local_updates import (
  local_updates as local_updates,
)
from jaxmotion.transforms._schemes._weight_part import (
  gather_block as gather_block,
  gather_params as gather_params,
)
from jaxmotion.transforms._sharded import sharded as sharded
from jaxmotion.transforms._states import (
  ExchangeState as ExchangeState,
  FullyShardedState as FullyShardedState,
  LocalState as LocalState,
  ShardedState as ShardedState,
)
from jaxmotion.transforms._step._scheme import (
  Scheme as Scheme,
  TrainState as TrainState,
)
from jaxmotion.transforms._step._train_step import (
  TrainStep as TrainStep,
  make_train_step as make_train_step,
)
from jaxmotion.transforms._wrappers import (
  clip_by_global_norm as clip_by_global_norm,
  delayed as delayed,
  local_value_and_grad as local_value_and_grad,
  per_worker as per_worker,
  skip_nonfinite as skip_nonfinite,
)

_set_public_module(__name__, globals())
