"""Types, trees, checks, randomness and the per-worker marker."""

from jaxmotion.core._bits import (
  from_bits as from_bits,
  saturate_cast as saturate_cast,
  select_or as select_or,
  to_bits as to_bits,
  word_dtype as word_dtype,
)
from jaxmotion.core._buffers import check_buffers as check_buffers
from jaxmotion.core._checks import (
  check_arrays as check_arrays,
  check_bool as check_bool,
  check_callable as check_callable,
  check_choice as check_choice,
  check_float as check_float,
  check_instance as check_instance,
  check_int as check_int,
  check_like as check_like,
  check_mapping as check_mapping,
  check_number as check_number,
  check_sequence as check_sequence,
  check_text as check_text,
  is_array as is_array,
  same_shapes as same_shapes,
  shape_string as shape_string,
  shape_strings as shape_strings,
)
from jaxmotion.core._compat import (
  abstract_like as abstract_like,
  assert_replicated as assert_replicated,
  axis_is_bound as axis_is_bound,
  axis_size as axis_size,
  check_on_mesh as check_on_mesh,
  eval_shape_in_map as eval_shape_in_map,
  find_free_axes as find_free_axes,
  gather_replicated as gather_replicated,
  is_compiler_partitioned as is_compiler_partitioned,
  is_inexact as is_inexact,
  is_varying as is_varying,
  list_platforms as list_platforms,
  place_tree as place_tree,
  put_on_mesh as put_on_mesh,
  scan_parts as scan_parts,
  shape_varying_like as shape_varying_like,
  spec_axes as spec_axes,
  to_varying as to_varying,
  to_varying_like as to_varying_like,
  trace_in_place as trace_in_place,
  tracks_varying as tracks_varying,
  varying_axes as varying_axes,
  without_context_mesh as without_context_mesh,
  worker_index as worker_index,
)
from jaxmotion.core._jax_extend import (
  jax_core as jax_core,
  source_info_util as source_info_util,
)
from jaxmotion.core._key import (
  Key as Key,
  combine_seeds as combine_seeds,
  make_key as make_key,
  random_words as random_words,
  random_words_at as random_words_at,
)
from jaxmotion.core._path_rules import PathRules as PathRules
from jaxmotion.core._per_worker import (
  PerWorker as PerWorker,
  Shared as Shared,
  Split as Split,
  drop_shared as drop_shared,
  map_shared as map_shared,
  name_axes as name_axes,
  pack_worker as pack_worker,
  settle_state as settle_state,
  shared_parts as shared_parts,
  state_specs as state_specs,
  unpack_worker as unpack_worker,
)
from jaxmotion.core._public import set_public_module as set_public_module
from jaxmotion.core._text_table import text_table as text_table
from jaxmotion.core._tree import (
  Array as Array,
  AxisName as AxisName,
  HostAxes as HostAxes,
  PyTree as PyTree,
  ShapedLike as ShapedLike,
  axis_names as axis_names,
  check_axis_name as check_axis_name,
  comparable_axes as comparable_axes,
  flatten_axes as flatten_axes,
  know_in_flax as know_in_flax,
  leaf_path as leaf_path,
  named_leaves as named_leaves,
  same_structure as same_structure,
  shape_dtype as shape_dtype,
  split_axes as split_axes,
  tree_bytes as tree_bytes,
)

# The package offers these classes by its own name, without loading this room.
set_public_module(
  "jaxmotion",
  {cls.__name__: cls for cls in (HostAxes, Key, PerWorker, Shared, Split)},
)
set_public_module(__name__, globals())
