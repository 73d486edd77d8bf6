"""Second tier of the collectives, for other rooms and authors of transforms.

Users of the collectives need none of these names.
"""

from jaxmotion.collectives._adaptive import (
  check_codecs as check_codecs,
  check_level as check_level,
  check_level_given as check_level_given,
)
from jaxmotion.collectives._arguments import (
  all_axes as all_axes,
  as_level as as_level,
  joint_axes as joint_axes,
)
from jaxmotion.collectives._branch_order import (
  branch_after as branch_after,
  branch_after_only as branch_after_only,
  order_branch as order_branch,
  waiting_scalars as waiting_scalars,
)
from jaxmotion.collectives._codec_memory import (
  PARTS as PARTS,
  make_memories as make_memories,
  memory_codec as memory_codec,
)
from jaxmotion.collectives._layout import (
  choose_methods as choose_methods,
  find_division as find_division,
  is_sharded as is_sharded,
  is_summed as is_summed,
  part_like as part_like,
  row_like as row_like,
  shard_like as shard_like,
)
from jaxmotion.collectives._methods import plan_messages as plan_messages
from jaxmotion.collectives._nonfinite import (
  NONFINITE_POLICIES as NONFINITE_POLICIES,
  all_finite as all_finite,
  apply_nonfinite_policy as apply_nonfinite_policy,
  keep_update as keep_update,
  zero_nonfinite as zero_nonfinite,
)
from jaxmotion.collectives._pieces import send_in_pieces as send_in_pieces
from jaxmotion.collectives._remembered import (
  Memory as Memory,
  StateLayout as StateLayout,
  convert_states as convert_states,
  list_remembered as list_remembered,
  mix_rows as mix_rows,
  read_memory as read_memory,
  write_memory as write_memory,
)
from jaxmotion.collectives._replicated import (
  check_rows as check_rows,
  run_with_loss as run_with_loss,
  update_params as update_params,
)
from jaxmotion.collectives._rounds import schedule_rounds as schedule_rounds
from jaxmotion.collectives._shards import (
  LeafCodec as LeafCodec,
  average_locally as average_locally,
  find_leaf_codecs as find_leaf_codecs,
  gather_shards as gather_shards,
  scatter_means as scatter_means,
)
from jaxmotion.collectives._state import (
  check_state as check_state,
  init_rows as init_rows,
)
from jaxmotion.collectives._transport import gather_payloads as gather_payloads
from jaxmotion.collectives._unshard import (
  HOST_WEIGHTS as HOST_WEIGHTS,
  PACKED_WEIGHTS as PACKED_WEIGHTS,
)
from jaxmotion.collectives._weight import (
  apply_weight as apply_weight,
  check_weight as check_weight,
)
