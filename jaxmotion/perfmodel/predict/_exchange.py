"""What an exchange of gradients takes, for any codec and number of workers."""

from __future__ import annotations

import math
from typing import NamedTuple

import jax

from jaxmotion.codecs import Codec
from jaxmotion.collectives.extend import row_like
from jaxmotion.core import PyTree, ShapedLike, tree_bytes
from jaxmotion.perfmodel.platform import Axis, Device, Platform, find_axis
from jaxmotion.perfmodel.predict._codecs import decode_seconds, encode_seconds
from jaxmotion.perfmodel.predict._collectives import ledger_seconds
from jaxmotion.perfmodel.predict._layout import (
  ExchangeLayout,
  Job,
  make_layout,
)
from jaxmotion.wire import Ledger


class ExchangePrediction(NamedTuple):
  """The time of one exchange, phase by phase.

  Args:
    ledger: what each worker sends.
    encode_s: before anything is sent.
    link_s: of all collectives.
    recode_s: decoding, summing and encoding between two phases.
    decode_s: decoding and summing what has arrived.
    memory_bytes: of payloads, sent and received, and of the codec's memory.

  Example:
    >>> from jaxmotion.wire import Ledger
    >>> ExchangePrediction(Ledger(), 1e-3, 2e-3, 0.0, 5e-4, 1000).total_s
    0.0035
  """

  ledger: Ledger
  encode_s: float
  link_s: float
  recode_s: float
  decode_s: float
  memory_bytes: int

  @property
  def total_s(self) -> float:
    """Seconds of all phases, one after the other."""
    return math.fsum((self.encode_s, self.link_s, self.recode_s, self.decode_s))


def exchange_ledger(
  tree: PyTree,
  mesh_axis: Axis,
  codec: Codec | None = None,
  *,
  method: str | None = None,
  local_axis: Axis | None = None,
) -> Ledger:
  """Counts what an exchange sends, for any number of workers.

  Exactly what `jaxmotion.wire.step_bytes` counts in the traced exchange.

  Args:
    tree: gradients: pytree of arrays or ShapeDtypeStructs.
    mesh_axis: the workers, or the hosts.
    codec: encodes what travels; None is full precision.
    method: "gather" or "two_phase"; None chooses as the exchange does. Codecs
      whose payloads can be added are summed; small arrays are gathered.
    local_axis: the devices of one host, which first reduce among themselves at
      full precision.

  Returns:
    The ledger.

  Raises:
    ValueError: an unknown method.
    TypeError: a leaf that is not floating-point.

  Example:
    >>> from jaxmotion import codecs
    >>> from jaxmotion.perfmodel import builtin_platform
    >>> cluster = builtin_platform("ethernet_1gbit").resize(data=65536)
    >>> data = cluster.axis("data")
    >>> grads = jax.ShapeDtypeStruct((8192, 8192), "float32")
    >>> plain = exchange_ledger(grads, data)
    >>> small = exchange_ledger(grads, data, codecs.sign())
    >>> round(plain.total_bytes / small.total_bytes)
    31
  """
  return make_layout(tree, mesh_axis, codec, method, local_axis).ledger


def predict_exchange(
  tree: PyTree,
  platform: Platform,
  mesh_axis: str,
  codec: Codec | None = None,
  *,
  method: str | None = None,
  local_axis: str | None = None,
  algorithm: str = "ring",
) -> ExchangePrediction:
  """Predicts the mean of a tree over workers, as `jaxmotion.exchange` does it.

  With `N` workers, an array of `n` values and its payload of `P(n)` bytes, a
  worker sends and computes

  =========  ==========================  ==================================
  method     bytes                       codec
  =========  ==========================  ==================================
  sum        `2 (N-1)/N P(n)`            encode n, decode n
  gather     `(N-1) P(n)`                encode n, decode and add N n
  two_phase  `2 (N-1) P(n / N)`          encode n + n/N, decode 2 n
  =========  ==========================  ==================================

  Args:
    tree: gradients: pytree of arrays or ShapeDtypeStructs.
    platform: devices and links.
    mesh_axis: name of the axis of the workers, or that of the hosts.
    codec: encodes what travels; None is full precision.
    method: as for `exchange_ledger`.
    local_axis: the axis of the devices of one host, if they reduce first.
    algorithm: of the collectives, as for `traffic`.

  Returns:
    The exchange.

  Raises:
    ValueError: an axis that the platform has not, an unknown method.
    TypeError: a leaf that is not floating-point.

  Example:
    >>> from jaxmotion import codecs
    >>> from jaxmotion.perfmodel import builtin_platform
    >>> cluster = builtin_platform("ethernet_1gbit")
    >>> grads = jax.ShapeDtypeStruct((2048, 2048), "float32")
    >>> plain = predict_exchange(grads, cluster, "data")
    >>> small = predict_exchange(grads, cluster, "data", codecs.sign())
    >>> small.total_s < plain.total_s / 10
    True
  """
  workers = find_axis(platform, "mesh_axis", mesh_axis)
  devices = None
  if local_axis is not None:
    devices = find_axis(platform, "local_axis", local_axis)
  plan = make_layout(tree, workers, codec, method, devices)
  return predict_plan(plan, platform, algorithm)


def predict_plan(
  plan: ExchangeLayout, platform: Platform, algorithm: str
) -> ExchangePrediction:
  """Predicts the exchange of all arrays of a plan at once."""
  workers, device = plan.mesh_axis.workers, platform.device
  phases = [_codec_seconds(job, workers, device) for job in plan.jobs]
  encode, recode, decode = (math.fsum(p[i] for p in phases) for i in range(3))
  link = ledger_seconds(plan.ledger, platform, algorithm=algorithm)
  memory = sum(_memory_bytes(job, workers) for job in plan.jobs)
  return ExchangePrediction(plan.ledger, encode, link, recode, decode, memory)


def _codec_seconds(
  job: Job, workers: int, device: Device
) -> tuple[float, float, float]:
  """Seconds before, between and after the collectives."""
  codec, n = job.codec, job.like.size
  encode = encode_seconds(codec, n, device)
  if job.method == "sum":
    return encode, 0.0, decode_seconds(codec, n, 1, device)
  if job.method == "gather":
    return encode, 0.0, decode_seconds(codec, n, workers, device)
  row = row_like(job.like, workers).size
  recode = decode_seconds(codec, row, workers, device)
  recode += encode_seconds(codec, row, device)
  return encode, recode, decode_seconds(codec, n, 1, device)


def _memory_bytes(job: Job, workers: int) -> int:
  codec, like, method, *_ = job
  if method != "two_phase":
    received = workers if method == "gather" else 0
    payload = tree_bytes(codec.payload_like(like))
    return _state_bytes(codec, like) + (1 + received) * payload
  # Rows that are sent, that are received, and those of the mean.
  row = row_like(like, workers)
  rows = 3 * workers * tree_bytes(codec.payload_like(row))
  return (workers + 1) * _state_bytes(codec, row) + rows


def _state_bytes(codec: Codec, like: ShapedLike) -> int:
  return tree_bytes(jax.eval_shape(codec.init, like))
