"""Selection of the elements of largest magnitude."""

from jaxmotion.kernels.select._api import (
  topk_scatter as topk_scatter,
  topk_select as topk_select,
  topk_sum as topk_sum,
)
