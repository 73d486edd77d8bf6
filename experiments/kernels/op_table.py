"""The ops of jaxmotion's kernels."""

from experiments.kernels import blocks, sparse, words
from experiments.kernels.ops import Op


def table() -> dict[str, Op]:
  """Returns all ops by name."""
  every = [*words.ops(), *blocks.ops(), *sparse.ops()]
  return {op.name: op for op in every}
