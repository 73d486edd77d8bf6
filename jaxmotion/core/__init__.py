"""Types, trees, checks, randomness and the per-worker marker."""

from jaxmotion.core._after import after as after
from jaxmotion.core._checks import (
  check_choice as check_choice,
  check_float as check_float,
  check_fraction as check_fraction,
  check_int as check_int,
  describe as describe,
)
from jaxmotion.core._compat import (
  axis_is_bound as axis_is_bound,
  axis_names as axis_names,
  axis_size as axis_size,
  closed_jaxpr as closed_jaxpr,
  same_on_workers as same_on_workers,
  scan_parts as scan_parts,
  shaped as shaped,
  stand_in as stand_in,
  to_varying as to_varying,
  tracks_varying as tracks_varying,
  varies as varies,
  varying_axes as varying_axes,
  worker_index as worker_index,
)
from jaxmotion.core._key import (
  Key as Key,
  combine as combine,
  make_key as make_key,
  random_words as random_words,
  random_words_at as random_words_at,
)
from jaxmotion.core._overwrite import overwrite as overwrite
from jaxmotion.core._per_worker import (
  PerWorker as PerWorker,
  pack_worker as pack_worker,
  state_specs as state_specs,
  unpack_worker as unpack_worker,
)
from jaxmotion.core._tree import (
  leaf_path as leaf_path,
  named_leaves as named_leaves,
  same_structure as same_structure,
  tree_bytes as tree_bytes,
)
from jaxmotion.core._types import (
  Array as Array,
  AxisName as AxisName,
  Like as Like,
  PyTree as PyTree,
  like as like,
)
