"""Second tier of the collectives, for other rooms and authors of transforms.

Users of the collectives need none of these names.
"""

from jaxmotion.collectives._all_reduce import (
  init_tree as init_tree,
  reduce_tree as reduce_tree,
)
from jaxmotion.collectives._arguments import (
  NONFINITE_POLICIES as NONFINITE_POLICIES,
  all_finite as all_finite,
  apply_nonfinite_policy as apply_nonfinite_policy,
  apply_weight as apply_weight,
  as_level as as_level,
  check_codecs as check_codecs,
  check_level_given as check_level_given,
  check_local_codec as check_local_codec,
  check_state as check_state,
  check_weight as check_weight,
  keep_update as keep_update,
  stateless as stateless,
  zero_nonfinite as zero_nonfinite,
)
from jaxmotion.collectives._layout import (
  ArrayPlan as ArrayPlan,
  choose_methods as choose_methods,
  find_division as find_division,
  is_sharded as is_sharded,
  is_summed as is_summed,
  part_like as part_like,
  plan_arrays as plan_arrays,
  row_like as row_like,
  shard_like as shard_like,
)
from jaxmotion.collectives._methods import plan_messages as plan_messages
from jaxmotion.collectives._replicated import (
  check_rows as check_rows,
  update_params as update_params,
)
from jaxmotion.collectives._rounds import (
  LeafCodec as LeafCodec,
  average_locally as average_locally,
  find_leaf_codecs as find_leaf_codecs,
  gather_shards as gather_shards,
  scatter_means as scatter_means,
  schedule_rounds as schedule_rounds,
)
from jaxmotion.collectives._states import (
  StateLayout as StateLayout,
  convert_states as convert_states,
  init_rows as init_rows,
  mix_rows as mix_rows,
  read_memory as read_memory,
  read_pending as read_pending,
  read_states as read_states,
  resize_parts as resize_parts,
  write_memory as write_memory,
  write_states as write_states,
)
from jaxmotion.collectives._transport import gather_payloads as gather_payloads
from jaxmotion.collectives._unshard import (
  HOST_WEIGHTS as HOST_WEIGHTS,
  PACKED_WEIGHTS as PACKED_WEIGHTS,
)
