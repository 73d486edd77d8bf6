"""Selection of the largest values."""

from jaxmotion.kernels.select._reference import (
  topk_scatter as topk_scatter,
  topk_select as topk_select,
)
