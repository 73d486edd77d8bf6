"""Predicts the seconds of a cost on a device, by a roofline for each kernel."""

from __future__ import annotations

import itertools
import math

from jaxmotion.perfmodel import _names, platform
from jaxmotion.perfmodel.cost import Cost, Kernel
from jaxmotion.perfmodel.predict import _checks


def predict_seconds(cost: Cost, device: platform.Device) -> float:
  r"""Predicts the seconds of a function on a device, kernel by kernel.

  A kernel `k` runs `n_k` times; each execution takes `F_k` FLOPs and moves
  `B_k` bytes:

  .. math::
    t = \sum_k n_k (t_0 + \max(F_k / f_k, B_k / m))

  `f_k` is the device's matmul rate for the dtype of the kernel, or its vector
  rate for kernels without a matmul. `m` is its memory rate and `t_0` the time
  of an empty kernel.

  Args:
    cost: cost of the function, from `predict_cost`.
    device: the device that runs it.

  Returns:
    Seconds.

  Raises:
    ValueError: the device has no rate for the dtype of a matmul.

  Example:
    >>> import jax
    >>> from jaxmotion.perfmodel import predict_cost, builtin_platform
    >>> x = jax.ShapeDtypeStruct((4096, 4096), "bfloat16")
    >>> square = predict_cost(lambda x: x @ x, x)
    >>> device = builtin_platform("h100_node").device
    >>> # 2 * 4096^3 FLOPs at 989.4 TFLOP/s
    >>> round(1e6 * predict_seconds(square, device), 1)
    140.9

  References:
    Williams, Waterman and Patterson, Roofline: an insightful visual
    performance model for multicore architectures, 2009.
  """
  _checks.check_cost("cost", cost)
  _checks.check_device("device", device)
  return math.fsum(kernel_seconds(kernel, device) for kernel in cost.kernels)


def kernel_seconds(kernel: Kernel, device: platform.Device) -> float:
  """Predicts the seconds of all executions of one kernel.

  A curve that was measured on the device replaces one side of the roofline:
  curves of matmuls and convolutions the FLOPs, all others the bytes. The other
  side stays a lower bound.

  Args:
    kernel: one kernel of a cost.
    device: the device that runs it.

  Returns:
    Seconds.

  Raises:
    ValueError: the device has no rate for the dtype of a matmul.

  Example:
    >>> from jaxmotion.perfmodel import Kernel, builtin_platform
    >>> copy = Kernel("elementwise", "float32", 0.0, 3.35e9, 2)
    >>> kernel_seconds(copy, builtin_platform("h100_node").device)
    0.002004
  """
  curve = device.measured.get(kernel_curve(kernel)[0])
  moved_s = kernel.bytes / device.memory_rate.bytes_per_s
  if kernel.kind in _names.MATMULS and curve is not None:
    return kernel.count * max(curve.seconds_at(kernel.flops), moved_s)
  rate = device.vector_flops_per_s
  if kernel.kind in _names.MATMULS:
    if kernel.dtype not in device.matmul_flops_per_s:
      raise ValueError(
        f"`matmul_flops_per_s` of {device.name!r} must have a rate for "
        f"{kernel.dtype!r}, got only {sorted(device.matmul_flops_per_s)}."
      )
    rate = device.matmul_flops_per_s[kernel.dtype]
  flops_s = kernel.flops / rate
  if curve is not None:
    return kernel.count * max(curve.seconds_at(kernel.bytes), flops_s)
  return kernel.count * (device.kernel_s + max(flops_s, moved_s))


def kernel_curve(kernel: Kernel) -> tuple[str, float]:
  """Returns the name of the curve that describes a kernel, and its size there.

  Args:
    kernel: one kernel of a cost.

  Returns:
    The key into `Device.measured`, and FLOPs (matmul, convolution) or bytes
    (all other kernels).

  Example:
    >>> from jaxmotion.perfmodel import Kernel
    >>> kernel_curve(Kernel("matmul", "float32", 2e6, 1.2e5))
    ('matmul float32', 2000000.0)
  """
  if kernel.kind in _names.MATMULS:
    return f"{kernel.kind} {kernel.dtype}", kernel.flops
  return kernel.kind, kernel.bytes


def predict_ready_seconds(
  cost: Cost, device: platform.Device
) -> tuple[float, ...]:
  """Predicts when each leaf of a function's result is in memory.

  Kernels run one after the other, in program order. The result of a loop is
  ready when the loop ends.

  Args:
    cost: cost of the function, from `predict_cost`.
    device: the device that runs it.

  Returns:
    Seconds from the start of the function, one for each leaf of its result.

  Raises:
    ValueError: the device has no rate for the dtype of a matmul.

  Example:
    >>> import jax
    >>> from jaxmotion.perfmodel import predict_cost, builtin_platform
    >>> x = jax.ShapeDtypeStruct((2**20,), "float32")
    >>> both = predict_cost(lambda x: (x.sum(), 2 * x), x)
    >>> h100 = builtin_platform("h100_node").device
    >>> first, last = predict_ready_seconds(both, h100)
    >>> first < last == predict_seconds(both, h100)
    True
  """
  _checks.check_cost("cost", cost)
  _checks.check_device("device", device)
  each = (kernel_seconds(kernel, device) for kernel in cost.kernels)
  after = [0.0, *itertools.accumulate(each)]
  return tuple(after[count] for count in cost.written)
