"""Composable compression transforms for data in motion in JAX training.

Add one line to an optax chain::

  tx = optax.chain(
    jaxmotion.exchange("data", codecs.uniform(bits=8)), optax.adamw(3e-4)
  )
"""

from jaxmotion import (
  checkpoint as checkpoint,
  codecs as codecs,
  collectives as collectives,
  controllers as controllers,
  hetero as hetero,
  memory as memory,
  perfmodel as perfmodel,
  planner as planner,
  presets as presets,
  testing as testing,
  transforms as transforms,
  wire as wire,
)
from jaxmotion.core import (
  Key as Key,
  PerWorker as PerWorker,
  Shared as Shared,
  Split as Split,
  make_key as make_key,
  set_public_module as _set_public_module,
  state_specs as state_specs,
)
from jaxmotion.transforms import (
  bind_mesh as bind_mesh,
  data_parallel as data_parallel,
  exchange as exchange,
  fully_sharded as fully_sharded,
  local_updates as local_updates,
  local_value_and_grad as local_value_and_grad,
  parallelize_step as parallelize_step,
  per_worker as per_worker,
  sharded as sharded,
  skip_nonfinite as skip_nonfinite,
)

_set_public_module(__name__, globals())

__version__ = "0.1.0.dev0"
