"""Seconds of a cost on a device."""

from __future__ import annotations

import itertools
import math

from jaxmotion.perfmodel.cost import Cost, Kernel
from jaxmotion.perfmodel.platform import Device

_MATMUL = ("matmul", "convolution")


def predict_seconds(cost: Cost, device: Device) -> float:
  r"""Returns the seconds that a device takes, by the roofline of each kernel.

  With the FLOPs `F` and bytes `B` of each of its executions:

  .. math::
    t = \sum_k n_k (t_0 + \max(F_k / f_k, B_k / m))

  where `f` is the rate of matrix products in the kernel's dtype, or that of
  vectors, `m` that of the memory and `t_0` the time of an empty kernel.

  Args:
    cost: of a function.
    device: what it runs on.

  Raises:
    ValueError: the device has no rate for the dtype of a matrix product.

  Example:
    >>> import jax
    >>> from jaxmotion.perfmodel import predict_cost, builtin_platform
    >>> x = jax.ShapeDtypeStruct((4096, 4096), "bfloat16")
    >>> square = predict_cost(lambda x: x @ x, x)
    >>> device = builtin_platform("h100_node").device
    >>> # 2 * 4096^3 FLOPs at 989.4 TFLOP/s:
    >>> round(1e6 * predict_seconds(square, device), 1)
    140.9

  References:
    Williams, Waterman and Patterson, Roofline: an insightful visual
    performance model for multicore architectures, 2009.
  """
  return math.fsum(kernel_seconds(kernel, device) for kernel in cost.kernels)


def kernel_seconds(kernel: Kernel, device: Device) -> float:
  """Returns the seconds of all executions of a kernel.

  Where the device has a curve of such kernels, it takes the place of the part
  of the roofline that it was measured for; the other part is still a bound.

  Args:
    kernel: one of a cost.
    device: what it runs on.

  Raises:
    ValueError: as `predict_seconds`.

  Example:
    >>> from jaxmotion.perfmodel import Kernel, builtin_platform
    >>> copy = Kernel("elementwise", "float32", 0.0, 3.35e9, 2)
    >>> kernel_seconds(copy, builtin_platform("h100_node").device)
    0.002004
  """
  curve = device.measured.get(kernel_curve(kernel)[0])
  moved_s = kernel.bytes / device.memory_rate.bytes_per_s
  if kernel.kind in _MATMUL and curve is not None:
    return kernel.count * max(curve.at(kernel.flops), moved_s)
  rate = device.vector_flops_per_s
  if kernel.kind in _MATMUL:
    if kernel.dtype not in device.matmul_flops_per_s:
      raise ValueError(
        f"`matmul_flops_per_s` of {device.name!r} must have a rate for "
        f"{kernel.dtype!r}, got only {sorted(device.matmul_flops_per_s)}."
      )
    rate = device.matmul_flops_per_s[kernel.dtype]
  if curve is not None:
    return kernel.count * max(curve.at(kernel.bytes), kernel.flops / rate)
  return kernel.count * (device.kernel_s + max(kernel.flops / rate, moved_s))


def kernel_curve(kernel: Kernel) -> tuple[str, float]:
  """The curve that a kernel is on, and its size there.

  Args:
    kernel: one of a cost.

  Example:
    >>> from jaxmotion.perfmodel import Kernel
    >>> kernel_curve(Kernel("matmul", "float32", 2e6, 1.2e5))
    ('matmul float32', 2000000.0)
  """
  if kernel.kind in _MATMUL:
    return f"{kernel.kind} {kernel.dtype}", kernel.flops
  return kernel.kind, kernel.bytes


def predict_ready_seconds(cost: Cost, device: Device) -> tuple[float, ...]:
  """Returns when each leaf of the result is in memory, from the start.

  Kernels run in program order. What a loop makes is ready when it ends.

  Args:
    cost: of a function.
    device: what it runs on.

  Raises:
    ValueError: as `predict_seconds`.

  Example:
    >>> import jax
    >>> from jaxmotion.perfmodel import predict_cost, builtin_platform
    >>> x = jax.ShapeDtypeStruct((2**20,), "float32")
    >>> both = predict_cost(lambda x: (x.sum(), 2 * x), x)
    >>> device = builtin_platform("h100_node").device
    >>> first, last = predict_ready_seconds(both, device)
    >>> first < last == predict_seconds(both, device)
    True
  """
  each = (kernel_seconds(kernel, device) for kernel in cost.kernels)
  after = [0.0, *itertools.accumulate(each)]
  return tuple(after[count] for count in cost.written)
