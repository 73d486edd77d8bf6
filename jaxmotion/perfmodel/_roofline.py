"""Predicts the seconds of kernels on a device, by a roofline for each.

Arguments that a public function has checked are not checked here: the planner
calls these functions thousands of times for one plan.
"""

import functools
import itertools
import math
from collections.abc import Iterable, Sequence

import jax
import jax.numpy as jnp

from jaxmotion import codecs, core, program
from jaxmotion.core import PyTree
from jaxmotion.perfmodel import _cost, _fusion, _ops, _platform

# A function is a series or a table lookup: on a GPU a quarter of the lanes or
# fewer compute it, in two instructions.
_FUNCTION_FLOPS = 8
# Products of large matrices reach about this share of a GPU's peak.
_MATMUL_SHARE = 0.7
# A codec is traced once, on this array, because tracing is slow.
_SAMPLE = jax.ShapeDtypeStruct((1024, 1024), "float32")


@core.declare(
  cost=_cost.check_cost,
  device=core.instance(_platform.Device, "a Device, such as `platform.device`"),
)
def predict_seconds(cost: _cost.Cost, device: _platform.Device) -> float:
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
    TypeError: an argument is of another class.
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
  return math.fsum(kernel_seconds(kernel, device) for kernel in cost.kernels)


def predict_ready_seconds(
  cost: _cost.Cost, device: _platform.Device
) -> tuple[float, ...]:
  """Predicts when each leaf of a function's result is in memory."""
  # Kernels run one after the other, in program order. The result of a loop is
  # ready when the loop ends.
  each = (kernel_seconds(kernel, device) for kernel in cost.kernels)
  after = [0.0, *itertools.accumulate(each)]
  return tuple(after[count] for count in cost.written)


def kernel_seconds(kernel: _fusion.Kernel, device: _platform.Device) -> float:
  """Predicts the seconds of all executions of one kernel."""
  # A curve that was measured on the device replaces one side of the roofline:
  # curves of matmuls and convolutions the FLOPs, all others the bytes. The
  # other side stays a lower bound.
  curve = device.measured.get(kernel_curve(kernel)[0])
  moved_s = kernel.bytes / device.memory_rate.bytes_per_s
  if kernel.kind in _ops.MATMULS and curve is not None:
    return kernel.count * max(curve.seconds_at(kernel.flops), moved_s)
  rate = device.vector_flops_per_s
  if kernel.kind in _ops.MATMULS:
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


def kernel_curve(kernel: _fusion.Kernel) -> tuple[str, float]:
  """Returns the key into `Device.measured` of a kernel, and its size there."""
  # The size of a matmul or convolution is its FLOPs, of other kernels bytes.
  if kernel.kind in _ops.MATMULS:
    return f"{kernel.kind} {kernel.dtype}", kernel.flops
  return kernel.kind, kernel.bytes


def operation_seconds(step: program.Step, device: _platform.Device) -> float:
  """Predicts the seconds of running one operation of a program once more."""
  # That is what the backward pass pays where it recomputes. Collectives, maps
  # that may hold them, transfers between memories, loops of unknown length and
  # operations without a known number of FLOPs take infinitely long: they are
  # not run again.
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
    # It is fused into what reads its result, so that it moves nothing.
    factor = _FUNCTION_FLOPS if step.name in program.TRANSCENDENTAL else 1
    return factor * _ops.count_flops(step) / device.vector_flops_per_s
  kernel = _fusion.count_operation(step)
  if kernel.kind in ("collective", "other"):
    return math.inf
  rate = device.vector_flops_per_s
  if kernel.kind in _ops.MATMULS:
    rate = _MATMUL_SHARE * device.matmul_flops_per_s.get(kernel.dtype, rate)
  moved_s = kernel.bytes / device.memory_rate.bytes_per_s
  return device.kernel_s + max(kernel.flops / rate, moved_s)


def predict_steps(
  inputs: Iterable[program.Value],
  steps: Sequence[program.Step],
  outputs: Iterable[program.Value],
  device: _platform.Device,
) -> tuple[float, float]:
  """Predicts seconds and FLOPs of steps that run as a program of their own."""
  # inputs: values that are in memory before; outputs: values that are written.
  joined = _ops.join_steps(inputs, steps, outputs)
  kernels, flops = _cost.count_steps(joined)
  rated = device.matmul_flops_per_s
  seconds = math.fsum(
    kernel_seconds(
      kernel
      if kernel.kind not in _ops.MATMULS or kernel.dtype in rated
      else kernel._replace(kind="elementwise"),
      device,
    )
    for kernel in kernels
  )
  return seconds, flops


def predict_peak(
  inputs: Iterable[program.Value],
  steps: Sequence[program.Step],
  outputs: Iterable[program.Value],
) -> int:
  """Predicts the most bytes that steps without loops hold at once."""
  return _cost.count_peak(_ops.join_steps(inputs, steps, outputs))


def encode_seconds(
  codec: codecs.Codec, size: int, device: _platform.Device
) -> float:
  """Predicts the seconds of encoding one array of `size` elements."""
  if codec == codecs.identity() or not size:
    return 0.0
  curve = device.measured.get(f"encode {codec!r}")
  if curve:
    return curve.seconds_at(size)
  return _scale_sample(_trace_encode(codec), size, device)


def decode_seconds(
  codec: codecs.Codec, size: int, payloads: int, device: _platform.Device
) -> float:
  """Predicts the seconds of decoding payloads of `size` elements and adding."""
  # Each payload after the first takes as long as the second one.
  if not size:
    return 0.0
  curves = [device.measured.get(f"{op} {codec!r}") for op in ("decode", "add")]
  if all(curves):
    first_s, next_s = (curve.seconds_at(size) for curve in curves if curve)
  else:
    first_s = _scale_sample(_trace_decode(codec, 1), size, device)
    both_s = _scale_sample(_trace_decode(codec, 2), size, device)
    next_s = max(both_s - first_s, 0.0)
  first_s = 0.0 if codec == codecs.identity() else first_s
  return first_s + (payloads - 1) * next_s


def _scale_sample(
  sample: _cost.Cost, size: int, device: _platform.Device
) -> float:
  """Predicts the seconds of a sample's kernels, scaled to `size` elements."""
  # The cost of a codec is taken as linear in the size.
  share = size / _SAMPLE.size
  return sum(
    kernel_seconds(
      k._replace(flops=k.flops * share, bytes=k.bytes * share), device
    )
    for k in sample.kernels
  )


# Tracing is slow, and the planner asks for a codec thousands of times. Loops of
# a codec whose trip count is unknown only update memory in place: they count as
# one iteration.
@functools.lru_cache(maxsize=256)
def _trace_encode(codec: codecs.Codec) -> _cost.Cost:
  """Counts the kernels of encoding the sample array."""

  def encode(x: jax.Array, state: PyTree) -> PyTree:
    return codec.encode(x, state, core.make_key(0))

  state = jax.eval_shape(codec.init, _SAMPLE)
  return _cost.predict_cost(encode, _SAMPLE, state, while_trips=1)


@functools.lru_cache(maxsize=512)
def _trace_decode(codec: codecs.Codec, payloads: int) -> _cost.Cost:
  """Counts the kernels of decoding and summing payloads of the sample."""

  def decode(payloads: PyTree) -> jax.Array:
    return jnp.sum(jax.vmap(lambda p: codec.decode(p, _SAMPLE))(payloads), 0)

  stacked = jax.tree.map(
    lambda a: jax.ShapeDtypeStruct((payloads, *a.shape), a.dtype),
    codec.payload_like(_SAMPLE),
  )
  return _cost.predict_cost(decode, stacked, while_trips=1)
