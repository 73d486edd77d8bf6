"""Second tier of the transformations, for other rooms.

Users of the transformations need none of these names.
"""

from jaxmotion.core import set_public_module as _set_public_module
from jaxmotion.transforms._exchange import (
  ExchangedLeaf as ExchangedLeaf,
  ExchangeOptions as ExchangeOptions,
  Options as Options,
  ShardedOptions as ShardedOptions,
  count_devices as count_devices,
)
from jaxmotion.transforms._init_state import check_mesh as check_mesh
from jaxmotion.transforms._placement import (
  check_trained as check_trained,
  find_exchanges as find_exchanges,
  is_exchange as is_exchange,
)
from jaxmotion.transforms._shardings import Shardings as Shardings
from jaxmotion.transforms._trace_state import (
  find_maker as find_maker,
  trace_state as trace_state,
)
from jaxmotion.transforms.parts._parts_layout import (
  PartsLayout as PartsLayout,
  parts_layout as parts_layout,
)
from jaxmotion.transforms.parts._shard_layout import LeafCut as LeafCut
from jaxmotion.transforms.step._compiled_step import (
  StepCalls as StepCalls,
  copy_methods as copy_methods,
)
from jaxmotion.transforms.step._run_on_workers import (
  Join as Join,
  fold_keys as fold_keys,
  is_key as is_key,
  join_name as join_name,
  run_on_workers as run_on_workers,
)
from jaxmotion.transforms.step._step_arguments import (
  place_arguments as place_arguments,
  split_specs as split_specs,
)
from jaxmotion.transforms.step._step_parameters import (
  Static as Static,
  StepParameters as StepParameters,
  make_decorator as make_decorator,
)

_set_public_module(__name__, globals())
