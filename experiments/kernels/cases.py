"""Ops of jaxmotion's kernels that are checked, timed and compiled."""

from collections.abc import Sequence

from experiments.kernels import blocks, ops, sparse, words

SIZES = (1 << 28, 1 << 31, 1 << 20, 1 << 16, 1 << 24)
"""Bytes of the float32 arrays that are timed.

The decisive sizes come first, in case time runs out."""

MAX_HOST_BYTES = 1 << 28
"""Largest of the sizes that is timed on a host by default."""

COMPILED_BYTES = 1 << 26
"""Bytes of the float32 array that ops are compiled for."""


def list_ops() -> dict[str, ops.Op]:
  """Returns all ops by name."""
  every = [*words.list_ops(), *blocks.list_ops(), *sparse.list_ops()]
  return {op.name: op for op in every}


def select_ops(names: Sequence[str]) -> list[ops.Op]:
  """Returns the ops of these names, or all ops if there are no names."""
  known = list_ops()
  return [known[name] for name in names or known]
