"""Predicts what a function costs: kernels, FLOPs, bytes moved, memory held."""

from jaxmotion.perfmodel.cost._cost import Cost as Cost, Total as Total
from jaxmotion.perfmodel.cost._count import predict_cost as predict_cost
from jaxmotion.perfmodel.cost._fusion import (
  Kernel as Kernel,
  count_operation as count_operation,
)
from jaxmotion.perfmodel.cost._ops import count_flops as count_flops
from jaxmotion.perfmodel.cost._uses import (
  ParamUses as ParamUses,
  find_uses as find_uses,
)
