"""Selection of elements: of largest magnitude, and at random positions."""

from jaxmotion.kernels.select._api import (
  topk_scatter as topk_scatter,
  topk_select as topk_select,
  topk_sum as topk_sum,
)
from jaxmotion.kernels.select._reference import (
  draw_stratified as draw_stratified,
  stratum_sizes as stratum_sizes,
)
