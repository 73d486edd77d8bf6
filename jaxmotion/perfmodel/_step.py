"""Predicts the time and memory of a data-parallel step.

`trace_step` counts what one worker computes, without a platform. `predict_step`
puts that on a platform. Gradients become ready at predicted times and fill
buckets in that order. Each bucket is one `Message` of the overlap model.
"""

import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import jax
import optax

from jaxmotion import codecs, core, wire
from jaxmotion.core import PyTree
from jaxmotion.perfmodel import (
  _collectives,
  _cost,
  _exchange,
  _platform,
  _roofline,
  _uses,
)

T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class StepPrediction:
  """Predicted seconds, bytes and memory of one worker's step.

  Args:
    compute_s: seconds of the forward and backward pass.
    encode_s: seconds of encoding what is sent.
    link_s: seconds of collectives, including the recoding between two phases.
    decode_s: seconds of decoding what is received.
    update_s: seconds of the optimizer.
    call_s: seconds of calling the compiled program.
    total_s: seconds from the batch to the new parameters, with the call.
    axis_bytes: bytes that one worker sends, by axis, the slowest first. A
      collective over several axes counts for the slowest.
    memory_bytes: peak bytes that one worker needs.

  Example:
    >>> sent = {"host": 1e6, "device": 3e6}
    >>> step = StepPrediction(4.0, 0.5, 3.0, 0.5, 1.0, 0.1, 7.1, sent, 1e9)
    >>> round(step.exposed_s, 3), step.wire_bytes
    (2.0, 4000000.0)
  """

  compute_s: float
  encode_s: float
  link_s: float
  decode_s: float
  update_s: float
  call_s: float
  total_s: float
  axis_bytes: Mapping[str, float]
  memory_bytes: float

  @property
  def exposed_s(self) -> float:
    """Seconds that the exchange adds to the step."""
    return self.total_s - self.compute_s - self.update_s - self.call_s

  @property
  def wire_bytes(self) -> float:
    """Bytes that one worker sends over all axes."""
    return math.fsum(self.axis_bytes.values())


@dataclasses.dataclass(frozen=True)
class StepCost:
  """Cost of what one worker computes in a step, on any platform.

  Args:
    params: pytree of ShapeDtypeStructs of the parameters.
    gradient: cost of the loss and its gradient.
    update: cost of the optimizer.
    written: for each parameter, the number of kernels after which its
      gradient is in memory.
    state_bytes: bytes of the optimizer's state on the device.
    optimizer: optimizer of the update.
    uses: how the loss reads its parameters.

  Example:
    >>> import jax.numpy as jnp
    >>> w = jax.ShapeDtypeStruct((64, 64), "float32")
    >>> x = jax.ShapeDtypeStruct((8, 64), "float32")
    >>> cost = trace_step(lambda w, x: jnp.sum(x @ w), w, (x,))
    >>> cost.written  # x w, sum, 1, x^T 1
    (4,)
  """

  params: PyTree
  gradient: _cost.Cost
  update: _cost.Cost
  written: tuple[int, ...]
  state_bytes: int
  optimizer: optax.GradientTransformation
  uses: _uses.ParamUses


@core.declare(
  loss_fn=core.function,
  params=core.typed_arrays,
  batch=core.arrays,
  optimizer=core.optional(
    core.instance(
      optax.GradientTransformation, "an optax transformation or None"
    )
  ),
)
def trace_step(
  loss_fn: Callable[..., Any],
  params: PyTree,
  batch: tuple[PyTree, ...],
  *,
  optimizer: optax.GradientTransformation | None = None,
  while_trips: int | None = None,
) -> StepCost:
  """Traces the loss, its gradient and the update of one worker.

  Args:
    loss_fn: `loss_fn(params, *batch)`, any JAX function that returns a scalar.
    params: pytree of arrays or ShapeDtypeStructs.
    batch: tuple of all arguments of `loss_fn` after `params`: the worker's own
      part of the batch, as arrays or ShapeDtypeStructs; `(x,)` for one.
    optimizer: optimizer of the update; None is SGD without momentum.
    while_trips: trip count of every `while` loop, as for `predict_cost`.

  Returns:
    The cost, for `predict_step` on any platform.

  Raises:
    TypeError: `batch` is not a tuple, a leaf of it or of `params` is no array,
      or `optimizer` is no optax transformation.
    ValueError: a loop has no trip count, as for `predict_cost`.

  Example:
    >>> def loss_fn(kernel, x):
    ...   return ((x @ kernel) ** 2).mean()
    >>> kernel = jax.ShapeDtypeStruct((64, 10), "float32")
    >>> x = jax.ShapeDtypeStruct((8, 64), "float32")
    >>> cost = trace_step(loss_fn, kernel, (x,))
    >>> int(cost.gradient.totals["matmul"].flops)  # two matmuls of 8 x 64 x 10
    20480
  """
  if not isinstance(batch, tuple):
    raise TypeError(
      "`batch` must be a tuple of the arguments of `loss_fn` after `params`, "
      f"got {type(batch).__name__}: write (batch,) for one."
    )
  optimizer = optax.sgd(0.1) if optimizer is None else optimizer
  state = jax.eval_shape(optimizer.init, params)
  gradient = _cost.predict_cost(
    lambda params, *batch: jax.value_and_grad(loss_fn)(params, *batch),
    params,
    *batch,
    while_trips=while_trips,
  )

  def apply_update(grads: PyTree, state: PyTree, params: PyTree) -> PyTree:
    updates, state = optimizer.update(grads, state, params)
    return optax.apply_updates(params, updates), state

  return StepCost(
    jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), params),
    gradient,
    _cost.predict_cost(apply_update, params, state, params),
    gradient.written[1:],
    core.count_device_bytes(optimizer.init, params),
    optimizer,
    _uses.find_uses(loss_fn, params, batch),
  )


@core.declare(
  step_cost=core.instance(StepCost, "a StepCost, as `trace_step` returns it"),
  bucket_bytes=core.optional(core.integer(1)),
  overlap=core.boolean,
  algorithm=_collectives.check_algorithm,
  base_step_s=core.optional(core.number(0, open_low=True)),
  **_exchange.EXCHANGE_ARGS,
)
def predict_step(
  step_cost: StepCost,
  platform: _platform.Platform,
  mesh_axis: str | core.HostAxes,
  codec: codecs.Codec | None = None,
  *,
  bucket_bytes: int | None = None,
  overlap: bool = True,
  method: str | None = None,
  algorithm: str = "ring",
  base_step_s: float | None = None,
) -> StepPrediction:
  """Predicts a step in which workers exchange their gradients.

  Gradients fill buckets in the order in which the backward pass computes them.
  A full bucket is encoded and sent while the backward pass goes on.

  Args:
    step_cost: cost of one worker with its part of the batch, from `trace_step`.
    platform: devices and links.
    mesh_axis: name of the axis of the workers. With `HostAxes` the devices of a
      host reduce among themselves first, at full precision.
    codec: codec of the payloads; None sends full precision.
    bucket_bytes: least bytes of gradients in every bucket but the last; None
      is one bucket, as `jaxmotion.exchange` has up to 8 MiB of payload.
    overlap: whether links and devices work at the same time.
    method: "gather" or "two_phase"; None chooses as the exchange does.
    algorithm: "ring", "halving_doubling" or "tree", as in
      `collective_traffic`.
    base_step_s: measured seconds of the whole step without any exchange;
      None predicts them. If given, computing, updating and calling together
      take that long, in the proportions of the roofline.

  Returns:
    The step; parameters and optimizer state are updated in place.

  Raises:
    TypeError: a parameter is not floating-point, or an argument of another
      class.
    ValueError: the platform has no such axis, or the device no rate for the
      dtype of a matmul. `method` or `algorithm` is unknown. `base_step_s` or
      `bucket_bytes` is not positive.

  Example:
    >>> from jaxmotion import codecs
    >>> from jaxmotion.perfmodel import builtin_platform
    >>> def loss_fn(kernel, x):
    ...   return ((x @ kernel) ** 2).mean()
    >>> kernel = jax.ShapeDtypeStruct((4096, 4096), "float32")
    >>> x = jax.ShapeDtypeStruct((32, 4096), "float32")
    >>> cost = trace_step(loss_fn, kernel, (x,))
    >>> cluster = builtin_platform("ethernet_10gbit")
    >>> plain = predict_step(cost, cluster, "data", bucket_bytes=25 << 20)
    >>> int8 = predict_step(
    ...   cost, cluster, "data", codecs.uniform(bits=8), bucket_bytes=25 << 20
    ... )
    >>> plain.total_s > int8.total_s
    True
  """
  device = platform.device
  hosts, devices = _platform.named_axes(platform, mesh_axis)
  layout = _exchange.make_layout(
    step_cost.params, hosts, codec, method, devices
  )
  compute_s = _roofline.predict_seconds(step_cost.gradient, device)
  update_s = _roofline.predict_seconds(step_cost.update, device)
  scale = 1.0
  if base_step_s is not None:
    scale = base_step_s / (compute_s + update_s + device.call_s)
  # The first leaf of the result is the loss; the others are gradients.
  ready_s = _roofline.predict_ready_seconds(step_cost.gradient, device)[1:]
  return predict_timeline(
    layout,
    [scale * s for s in ready_s],
    platform,
    compute_s=scale * compute_s,
    update_s=scale * update_s,
    call_s=scale * device.call_s,
    memory_bytes=step_cost.gradient.peak_bytes + step_cost.state_bytes,
    bucket_bytes=bucket_bytes,
    overlap=overlap,
    algorithm=algorithm,
  )


def predict_timeline(
  layout: _exchange.ExchangeLayout,
  ready_s: Sequence[float],
  platform: _platform.Platform,
  *,
  compute_s: float,
  update_s: float,
  call_s: float,
  memory_bytes: int,
  bucket_bytes: int | None,
  overlap: bool,
  algorithm: str,
) -> StepPrediction:
  """Predicts a step of gradients that fill buckets as they become ready."""
  # `ready_s`: seconds after which the gradient of each leaf is in memory.
  # `compute_s`: seconds of the forward and backward pass.
  # `memory_bytes`: those of a step without exchange.

  def ready_time(array: _exchange.ExchangedArray) -> float:
    return max(ready_s[i] for i in array.leaves)

  messages, exchanges, last = [], [], 0.0
  # In this order the time since the previous bucket is never negative, which
  # the overlap model relies on.
  in_order = sorted(layout.arrays, key=ready_time)
  size_of = lambda array: core.tree_bytes(array.whole)
  for bucket in fill_buckets(in_order, size_of, bucket_bytes):
    part = layout._replace(arrays=tuple(bucket))
    exchange = _exchange.predict_layout(part, platform, algorithm)
    now = ready_time(bucket[-1])
    # Recoding between two phases is on the device, but the second phase has
    # to wait for it: it counts as part of the transfer.
    link_s = exchange.link_s + exchange.recode_s
    messages.append(
      Message(now - last, exchange.encode_s, link_s, exchange.decode_s)
    )
    exchanges.append(exchange)
    last = now
  # What is computed after the last bucket is ready.
  messages.append(Message(max(compute_s - last, 0.0), 0.0, 0.0, 0.0))
  # The update waits for the last message and the call comes before the first:
  # their seconds are added to the pipeline's and overlap with nothing.
  axes = [a.name for a in (layout.hosts, layout.devices) if a]
  end = (overlapped_seconds if overlap else blocking_seconds)(messages)
  return StepPrediction(
    compute_s,
    math.fsum(m.encode_s for m in messages),
    math.fsum(m.link_s for m in messages),
    math.fsum(m.decode_s for m in messages),
    update_s,
    call_s,
    end + update_s + call_s,
    sum_axis_bytes((m for e in exchanges for m in e.ledger.moves), axes),
    memory_bytes + sum(e.memory_bytes for e in exchanges),
  )


def sum_axis_bytes(
  moves: Iterable[wire.Move], axes: Sequence[str]
) -> dict[str, float]:
  """Returns the bytes of moves by the slowest axis of each, `axes[0]` first."""
  sent = dict.fromkeys(axes, 0.0)
  for move in moves:
    sent[min(move.axes, key=axes.index)] += move.wire_bytes
  return sent


def fill_buckets(
  items: Iterable[T], nbytes: Callable[[T], int], bucket_bytes: int | None
) -> Iterator[list[T]]:
  """Yields buckets of at least `bucket_bytes`; the last may be smaller."""
  bucket: list[T] = []
  for item in items:
    bucket.append(item)
    if bucket_bytes and sum(map(nbytes, bucket)) >= bucket_bytes:
      yield bucket
      bucket = []
  if bucket:
    yield bucket


class Message(NamedTuple):
  """One bucket of gradients that is encoded, sent and decoded by itself."""

  # From when the previous bucket was ready until this one is.
  compute_s: float
  # On the device, which computes nothing else meanwhile.
  encode_s: float
  # On the link, including the recoding between two phases.
  link_s: float
  # On the device, after the backward pass.
  decode_s: float


def blocking_seconds(messages: Sequence[Message]) -> float:
  """Returns when the last message is decoded if nothing overlaps."""
  return math.fsum(part for message in messages for part in message)


def overlapped_seconds(messages: Sequence[Message]) -> float:
  """Returns when the last message is decoded if the link runs concurrently."""
  # The device computes and encodes one message after the other, and the link
  # carries them in the same order: encoding a message delays all later
  # gradients. Once the backward pass is over, the device decodes.
  device = link = 0.0
  arrivals = []
  for message in messages:
    device += message.compute_s + message.encode_s
    link = max(device, link) + message.link_s
    arrivals.append((link, message.decode_s))
  end = device
  for arrival, decode_s in arrivals:
    end = max(end, arrival) + decode_s
  return end
