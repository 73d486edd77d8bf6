"""The ops of jaxmotion's kernels."""

from experiments.kernels import _blocks, _sparse, _words
from experiments.kernels._ops import Op


def table() -> dict[str, Op]:
  """Returns all ops by name."""
  every = [*_words.ops(), *_blocks.ops(), *_sparse.ops()]
  return {op.name: op for op in every}
