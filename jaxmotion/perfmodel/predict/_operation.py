"""Predicts the seconds of one operation of a flat program."""

from __future__ import annotations

import math

from jaxmotion import program
from jaxmotion.perfmodel import _names, cost, platform

# A function is a series or a table lookup: on a GPU a quarter of the lanes or
# fewer compute it, in two instructions.
_FUNCTION_FLOPS = 8
# Products of large matrices reach about this share of a GPU's peak.
_MATMUL_SHARE = 0.7


def operation_seconds(step: program.Step, device: platform.Device) -> float:
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
  inner = program.inner_jaxprs(step.eqn)
  if inner and step.name in (program.CALLS | {"scan"}) - {"shard_map"}:
    steps = program.flatten(inner[0], calls="all").steps
    runs = step.params["length"] if step.name == "scan" else 1
    return runs * math.fsum(operation_seconds(one, device) for one in steps)
  if inner:
    return math.inf
  if step.name in program.VIEWS:
    return 0.0
  if step.name == "device_put":
    return math.inf
  if not program.is_expensive(step.eqn):
    factor = _FUNCTION_FLOPS if step.name in program.TRANSCENDENTAL else 1
    return factor * cost.count_flops(step) / device.vector_flops_per_s
  kernel = cost.count_operation(step)
  if kernel.kind in ("collective", "other"):
    return math.inf
  rate = device.vector_flops_per_s
  if kernel.kind in _names.MATMULS:
    rate = _MATMUL_SHARE * device.matmul_flops_per_s.get(kernel.dtype, rate)
  moved_s = kernel.bytes / device.memory_rate.bytes_per_s
  return device.kernel_s + max(kernel.flops / rate, moved_s)
