"""Calls of the types, keys and state markers."""

import numpy as np

from jaxmotion.core import Key, PerWorker
from tests.arguments.calls import Call

KEY = Key(np.uint32(1), np.uint32(2))
STATE = {"count": np.float32(0), "e": PerWorker(np.zeros((4, 3), np.float32))}

CALLS = {
  "core.make_key": Call(0, 1, traced=True),
  "core.Key.fold": Call(3, on=KEY.fold, traced=True),
  "core.Key.fold_path": Call("a/b", on=KEY.fold_path, traced=True),
  "core.state_specs": Call(STATE, "data"),
}
_INTERNAL = "other rooms call it with what they have checked"
UNCALLED = dict.fromkeys(
  """
  check_* shape_string from_bits to_bits word_dtype saturate_cast abstract_like
  assert_replicated axis_is_bound axis_names axis_size closed_jaxpr is_varying
  scan_parts shape_varying_like to_varying tracks_varying varying_axes
  worker_index combine_seeds random_words random_words_at PathRules
  PathRules.* pack_worker unpack_worker set_public_module schedule_after
  text_table leaf_path named_leaves same_structure tree_bytes shape_dtype
  update_in_place is_inexact vjp_inexact StepsInFlight StepsInFlight.*
  float0_zeros
  """.split(),
  _INTERNAL,
)
UNCALLED = {f"core.{name}": reason for name, reason in UNCALLED.items()}
ACCEPTED = {}
KNOWN_BAD = {
  ("core.make_key", "seed"),
  ("core.make_key", "worker"),
  ("core.Key.fold", "data"),
  ("core.Key.fold_path", "path"),
  ("core.state_specs", "state"),
  ("core.state_specs", "axis_name"),
}
