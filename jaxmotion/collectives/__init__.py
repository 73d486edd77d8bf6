"""Collectives over mesh axes that send arrays through a codec.

Call them inside `shard_map` or `pmap`. Each takes an axis name and a codec, and
returns its result and the codec's new state.
"""

from jaxmotion.collectives._all_reduce import (
  all_reduce as all_reduce,
  all_reduce_init as all_reduce_init,
)
from jaxmotion.collectives._arguments import (
  max_over_workers as max_over_workers,
)
from jaxmotion.collectives._byte_planes import (
  all_gather_planes as all_gather_planes,
  broadcast_planes as broadcast_planes,
)
from jaxmotion.collectives._moves import (
  all_gather as all_gather,
  all_gather_init as all_gather_init,
  all_to_all as all_to_all,
  permute as permute,
  reduce_scatter as reduce_scatter,
  reduce_scatter_init as reduce_scatter_init,
)
from jaxmotion.collectives._unshard import unshard as unshard
from jaxmotion.core import set_public_module as _set_public_module

_set_public_module(__name__, globals())
