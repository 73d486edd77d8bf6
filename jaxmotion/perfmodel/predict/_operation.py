"""Predicts the seconds of one operation of a flat program."""

from __future__ import annotations

import math

from jaxmotion.perfmodel._names import MATMULS
from jaxmotion.perfmodel.cost import count_flops, count_operation
from jaxmotion.perfmodel.platform import Device
from jaxmotion.program import (
  CALLS,
  TRANSCENDENTAL,
  VIEWS,
  Step,
  flatten,
  inner_jaxprs,
  is_expensive,
)

# A function is a series or a table lookup: on a GPU a quarter of the lanes or
# fewer compute it, in two instructions.
_FUNCTION_FLOPS = 8
# Products of large matrices reach about this share of a GPU's peak.
_MATMUL_SHARE = 0.7


def operation_seconds(step: Step, device: Device) -> float:
  """Predicts the seconds of running one operation once more.

  A cheap operation is fused into what reads its result, so that it moves
  nothing. All others read their operands and write their results. A loop of a
  known length takes its iterations' time.

  Args:
    step: operation of a flat program.
    device: device that runs it.

  Returns:
    Seconds; infinity for collectives, transfers between memories, loops of
    unknown length and operations without a known number of FLOPs.
  """
  inner = inner_jaxprs(step.eqn)
  if inner and step.name in (CALLS | {"scan"}) - {"shard_map"}:
    steps = flatten(inner[0], calls="all").steps
    runs = step.params["length"] if step.name == "scan" else 1
    return runs * math.fsum(operation_seconds(one, device) for one in steps)
  if inner:
    return math.inf
  if step.name in VIEWS:
    return 0.0
  if step.name == "device_put":
    return math.inf
  if not is_expensive(step.eqn):
    factor = _FUNCTION_FLOPS if step.name in TRANSCENDENTAL else 1
    return factor * count_flops(step) / device.vector_flops_per_s
  kernel = count_operation(step)
  if kernel.kind in ("collective", "other"):
    return math.inf
  rate = device.vector_flops_per_s
  if kernel.kind in MATMULS:
    rate = _MATMUL_SHARE * device.matmul_flops_per_s.get(kernel.dtype, rate)
  moved_s = kernel.bytes / device.memory_rate.bytes_per_s
  return device.kernel_s + max(kernel.flops / rate, moved_s)
