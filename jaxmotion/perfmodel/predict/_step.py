"""The time and memory of a data-parallel step."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import optax

from jaxmotion.codecs import Codec
from jaxmotion.core import PyTree, check_int, tree_bytes
from jaxmotion.perfmodel.cost import Cost, predict_cost
from jaxmotion.perfmodel.platform import Platform, check_quantity, find_axis
from jaxmotion.perfmodel.predict._exchange import (
  ExchangePrediction,
  predict_plan,
)
from jaxmotion.perfmodel.predict._layout import ExchangeLayout, Job, make_layout
from jaxmotion.perfmodel.predict._overlap import (
  Message,
  blocking_seconds,
  overlapped_seconds,
)
from jaxmotion.perfmodel.predict._roofline import (
  predict_ready_seconds,
  predict_seconds,
)


@dataclasses.dataclass(frozen=True)
class StepPrediction:
  """A predicted step of one worker; all seconds.

  Args:
    compute_s: forward and backward pass.
    encode_s: encoding what is sent.
    link_s: collectives, with what is recoded between their phases.
    decode_s: decoding what has arrived.
    update_s: the optimiser.
    call_s: calling the compiled program.
    total_s: from the batch to the new parameters, with the call.
    wire_bytes: sent by one worker.
    memory_bytes: that one worker needs at most.

  Example:
    >>> step = StepPrediction(4.0, 0.5, 3.0, 0.5, 1.0, 0.1, 7.1, 1e6, 1e9)
    >>> round(step.exposed_s, 3)
    2.0
  """

  compute_s: float
  encode_s: float
  link_s: float
  decode_s: float
  update_s: float
  call_s: float
  total_s: float
  wire_bytes: float
  memory_bytes: float

  @property
  def exposed_s(self) -> float:
    """Seconds that the exchange adds to the step."""
    return self.total_s - self.compute_s - self.update_s - self.call_s


@dataclasses.dataclass(frozen=True)
class StepCost:
  """What one worker computes in a step.

  Args:
    params: shapes of the parameters.
    gradient: cost of the loss and its gradient.
    update: cost of the optimiser.
    written: for each parameter, the number of kernels after which its
      gradient is in memory.
    state_bytes: of the optimiser.

  Example:
    >>> import jax.numpy as jnp
    >>> w = jax.ShapeDtypeStruct((64, 64), "float32")
    >>> x = jax.ShapeDtypeStruct((8, 64), "float32")
    >>> trace_step(lambda w, x: jnp.sum(x @ w), w, (x,)).written  # x w, sum, 1, x^T 1
    (4,)
  """

  params: PyTree
  gradient: Cost
  update: Cost
  written: tuple[int, ...]
  state_bytes: int


def trace_step(
  loss_fn: Callable[..., Any],
  params: PyTree,
  batch: tuple[PyTree, ...],
  *,
  optimizer: optax.GradientTransformation | None = None,
  while_trips: int | Mapping[str, int] | None = None,
  branch_shares: Sequence[float] | None = None,
) -> StepCost:
  """Traces what one worker computes.

  Args:
    loss_fn: `loss_fn(params, *batch)`, a scalar: any JAX function.
    params: pytree of arrays or ShapeDtypeStructs.
    batch: the worker's own part of the batch, as the tuple of all arguments
      after `params`: `(x,)` for one.
    optimizer: of the update; None is SGD without momentum.
    while_trips: as for `predict_cost`.
    branch_shares: as for `predict_cost`.

  Raises:
    TypeError: `batch` is not a tuple.
    ValueError: as `predict_cost`.

  Example:
    >>> def loss_fn(kernel, x):
    ...   return ((x @ kernel) ** 2).mean()
    >>> kernel = jax.ShapeDtypeStruct((64, 10), "float32")
    >>> x = jax.ShapeDtypeStruct((8, 64), "float32")
    >>> own = trace_step(loss_fn, kernel, (x,))
    >>> int(own.gradient.totals["matmul"].flops)  # two products of 8 x 64 x 10
    20480
  """
  if not isinstance(batch, tuple):
    raise TypeError(
      "`batch` must be a tuple of the arguments of `loss_fn` after `params`, "
      f"got {type(batch).__name__}: write (batch,) for one."
    )
  optimizer = optax.sgd(0.1) if optimizer is None else optimizer
  state = jax.eval_shape(optimizer.init, params)
  options: dict[str, Any] = dict(
    while_trips=while_trips, branch_shares=branch_shares
  )
  gradient = predict_cost(
    lambda params, *batch: jax.value_and_grad(loss_fn)(params, *batch),
    params,
    *batch,
    **options,
  )

  def step(grads: PyTree, state: PyTree, params: PyTree) -> PyTree:
    updates, state = optimizer.update(grads, state, params)
    return optax.apply_updates(params, updates), state

  return StepCost(
    jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), params),
    gradient,
    predict_cost(step, params, state, params),
    gradient.written[1:],
    tree_bytes(state),
  )


def predict_step(
  step_cost: StepCost,
  platform: Platform,
  mesh_axis: str,
  codec: Codec | None = None,
  *,
  bucket_bytes: int | None = None,
  overlap: bool = True,
  method: str | None = None,
  local_axis: str | None = None,
  algorithm: str = "ring",
  alone_s: float | None = None,
) -> StepPrediction:
  """Predicts a step in which workers exchange their gradients.

  Gradients are put into buckets in the order in which the backward pass makes
  them. A bucket that is full is encoded and sent while the pass goes on.

  Args:
    step_cost: of one worker, with its part of the batch.
    platform: devices and links.
    mesh_axis: name of the axis of the workers, or of the hosts.
    codec: encodes what travels; None is full precision.
    bucket_bytes: of gradients, at least, in all buckets but the last; None is
      one bucket, as `jaxmotion.exchange` has up to 8 MiB of payload.
    overlap: whether links and devices work at once.
    method: as for `predict_exchange`.
    local_axis: as for `predict_exchange`.
    algorithm: as for `predict_exchange`.
    alone_s: seconds of the whole step without any exchange, if they were
      measured; computing, updating and calling then take that together, in
      the proportions of the roofline.

  Returns:
    The step; parameters and the optimiser's state are updated in place.

  Raises:
    ValueError: as `predict_exchange` and `predict_seconds`; `alone_s` is not positive.

  Example:
    >>> from jaxmotion import codecs
    >>> from jaxmotion.perfmodel import builtin_platform
    >>> def loss_fn(kernel, x):
    ...   return ((x @ kernel) ** 2).mean()
    >>> kernel = jax.ShapeDtypeStruct((4096, 4096), "float32")
    >>> x = jax.ShapeDtypeStruct((32, 4096), "float32")
    >>> own = trace_step(loss_fn, kernel, (x,))
    >>> cluster = builtin_platform("ethernet_10gbit")
    >>> plain = predict_step(own, cluster, "data", bucket_bytes=25 << 20)
    >>> int8 = predict_step(
    ...   own, cluster, "data", codecs.uniform(bits=8), bucket_bytes=25 << 20
    ... )
    >>> plain.total_s > int8.total_s
    True
  """
  device = platform.device
  workers = find_axis(platform, "mesh_axis", mesh_axis)
  devices = None
  if local_axis is not None:
    devices = find_axis(platform, "local_axis", local_axis)
  plan = make_layout(step_cost.params, workers, codec, method, devices)
  compute, update = (
    predict_seconds(part, device)
    for part in (step_cost.gradient, step_cost.update)
  )
  scale = 1.0
  if alone_s is not None:
    check_quantity("alone_s", alone_s)
    scale = alone_s / (compute + update + device.call_s)
  ready = [
    scale * s for s in predict_ready_seconds(step_cost.gradient, device)[1:]
  ]
  messages, exchanges = exchange_messages(
    plan, ready, scale * compute, platform, bucket_bytes, algorithm
  )
  return make_step(
    messages,
    exchanges,
    compute_s=scale * compute,
    update_s=scale * update,
    call_s=scale * device.call_s,
    memory_bytes=step_cost.gradient.peak_bytes + step_cost.state_bytes,
    overlap=overlap,
  )


def exchange_messages(
  plan: ExchangeLayout,
  ready: Sequence[float],
  compute_s: float,
  platform: Platform,
  bucket_bytes: int | None,
  algorithm: str,
) -> tuple[list[Message], list[ExchangePrediction]]:
  """Puts gradients into buckets, the first ready first.

  Args:
    plan: how they are exchanged.
    ready: seconds after which each leaf is there.
    compute_s: seconds after which all is computed.
    platform: devices and links.
    bucket_bytes: of all buckets but the last, at least; None for one bucket.
    algorithm: of the collectives.

  Returns:
    A message for each bucket and one for what is computed after the last of
    them, and the exchange of each bucket.
  """
  if bucket_bytes is not None:
    check_int("bucket_bytes", bucket_bytes, 1)

  def there(job: Job) -> float:
    return max(ready[i] for i in job.leaves)

  messages, exchanges, last = [], [], 0.0
  for bucket in _buckets(sorted(plan.jobs, key=there), bucket_bytes):
    only = plan._replace(jobs=tuple(bucket))
    part = predict_plan(only, platform, algorithm)
    now = there(bucket[-1])
    link_s = part.link_s + part.recode_s
    messages.append(Message(now - last, part.encode_s, link_s, part.decode_s))
    exchanges.append(part)
    last = now
  messages.append(Message(max(compute_s - last, 0.0), 0.0, 0.0, 0.0))
  return messages, exchanges


def _buckets(
  jobs: Sequence[Job], bucket_bytes: int | None
) -> Iterator[list[Job]]:
  full: list[Job] = []
  for job in jobs:
    full.append(job)
    if bucket_bytes and tree_bytes([j.whole for j in full]) >= bucket_bytes:
      yield full
      full = []
  if full:
    yield full


def make_step(
  messages: Sequence[Message],
  exchanges: Sequence[ExchangePrediction],
  *,
  compute_s: float,
  update_s: float,
  call_s: float,
  memory_bytes: int,
  overlap: bool,
) -> StepPrediction:
  """Returns the step that computes and exchanges so much.

  Args:
    messages: in the order in which they are there.
    exchanges: those of them that are exchanged.
    compute_s: of the forward and backward pass.
    update_s: of the optimiser.
    call_s: of the compiled program's call.
    memory_bytes: without what is exchanged.
    overlap: whether links and devices work at once.
  """
  end = (overlapped_seconds if overlap else blocking_seconds)(messages)
  return StepPrediction(
    compute_s,
    math.fsum(m.encode_s for m in messages),
    math.fsum(m.link_s for m in messages),
    math.fsum(m.decode_s for m in messages),
    update_s,
    call_s,
    end + update_s + call_s,
    math.fsum(e.ledger.total_bytes for e in exchanges),
    memory_bytes + sum(e.memory_bytes for e in exchanges),
  )
