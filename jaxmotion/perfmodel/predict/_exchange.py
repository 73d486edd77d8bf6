"""Predicts the seconds and bytes of one exchange of gradients."""

from __future__ import annotations

import math
from typing import NamedTuple

import jax

from jaxmotion import codecs, core, wire
from jaxmotion.collectives.extend import ArrayPlan, plan_messages
from jaxmotion.core import PyTree, ShapedLike
from jaxmotion.perfmodel.platform import Device, Platform
from jaxmotion.perfmodel.predict import _checks, _codecs, _collectives, _layout


class ExchangePrediction(NamedTuple):
  """Predicted seconds, bytes and memory of one exchange, by phase.

  Args:
    ledger: collectives that each worker takes part in, with their bytes.
    encode_s: seconds of encoding before the first collective.
    link_s: seconds of all collectives.
    recode_s: seconds of decoding, summing and encoding between two phases.
    decode_s: seconds of decoding and summing the received payloads.
    memory_bytes: bytes of sent and received payloads and of codec state.

  Example:
    >>> from jaxmotion.wire import Ledger
    >>> ExchangePrediction(Ledger(), 1e-3, 2e-3, 0.0, 5e-4, 1000).total_s
    0.0035
  """

  ledger: wire.Ledger
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
  platform: Platform,
  mesh_axis: str | core.HostAxes,
  codec: codecs.Codec | None = None,
  *,
  method: str | None = None,
) -> wire.Ledger:
  """Counts the bytes that an exchange sends, for any number of workers.

  The ledger equals that of `jaxmotion.wire.step_bytes` for the traced
  exchange, but needs no mesh of that many devices.

  Args:
    tree: gradients, a pytree of floating-point arrays or ShapeDtypeStructs.
    platform: devices and links; only its axes are read.
    mesh_axis: name of the axis of the workers. With `HostAxes` the devices of a
      host reduce among themselves first, at full precision.
    codec: codec of the payloads; None sends full precision.
    method: "gather" or "two_phase"; None chooses as the exchange does:
      payloads that can be added are summed, small arrays gathered.

  Returns:
    The ledger.

  Raises:
    TypeError: a leaf is not floating-point, or an argument of another class.
    ValueError: the platform has no such axis, or `method` is unknown.

  Example:
    >>> from jaxmotion import codecs
    >>> from jaxmotion.perfmodel import builtin_platform
    >>> cluster = builtin_platform("ethernet_1gbit").resize(data=65536)
    >>> grads = jax.ShapeDtypeStruct((8192, 8192), "float32")
    >>> plain = exchange_ledger(grads, cluster, "data")
    >>> sign = exchange_ledger(grads, cluster, "data", codecs.sign())
    >>> round(plain.total_bytes / sign.total_bytes)
    31
  """
  _checks.check_gradients(tree)
  _checks.check_platform(platform)
  _checks.check_codec_given("codec", codec)
  hosts, devices = _checks.named_axes(platform, mesh_axis)
  return _layout.make_layout(tree, hosts, codec, method, devices).ledger


def predict_exchange(
  tree: PyTree,
  platform: Platform,
  mesh_axis: str | core.HostAxes,
  codec: codecs.Codec | None = None,
  *,
  method: str | None = None,
  algorithm: str = "ring",
) -> ExchangePrediction:
  """Predicts one exchange: the mean of a tree over workers.

  The exchange is that of `jaxmotion.exchange`. With `N` workers and an array
  of `n` elements whose payload has `P(n)` bytes, each worker sends and
  computes

  =========  ==========================  ==================================
  method     bytes                       codec
  =========  ==========================  ==================================
  sum        `2 (N-1)/N P(n)`            encode n, decode n
  gather     `(N-1) P(n)`                encode n, decode and add N n
  two_phase  `2 (N-1) P(n / N)`          encode n + n/N, decode 2 n
  rounds     those of its messages       encode n, decode n
  =========  ==========================  ==================================

  The last is the method of codecs that reduce in rounds of their own.

  Args:
    tree: gradients, a pytree of floating-point arrays or ShapeDtypeStructs.
    platform: devices and links.
    mesh_axis: name of the axis of the workers. With `HostAxes` the devices of a
      host reduce among themselves first, at full precision.
    codec: codec of the payloads; None sends full precision.
    method: "gather" or "two_phase"; None chooses as the exchange does.
    algorithm: "ring", "halving_doubling" or "tree", as in
      `collective_traffic`.

  Returns:
    Seconds, bytes and memory of one worker.

  Raises:
    TypeError: a leaf is not floating-point, or an argument of another class.
    ValueError: the platform has no such axis, or `method` or `algorithm` is
      unknown.

  Example:
    >>> from jaxmotion import codecs
    >>> from jaxmotion.perfmodel import builtin_platform
    >>> cluster = builtin_platform("ethernet_1gbit")
    >>> grads = jax.ShapeDtypeStruct((2048, 2048), "float32")
    >>> plain = predict_exchange(grads, cluster, "data")
    >>> sign = predict_exchange(grads, cluster, "data", codecs.sign())
    >>> sign.total_s < plain.total_s / 10
    True
  """
  _checks.check_gradients(tree)
  _checks.check_platform(platform)
  _checks.check_codec_given("codec", codec)
  _collectives.check_algorithm(algorithm)
  hosts, devices = _checks.named_axes(platform, mesh_axis)
  layout = _layout.make_layout(tree, hosts, codec, method, devices)
  return predict_layout(layout, platform, algorithm)


def predict_layout(
  layout: _layout.ExchangeLayout, platform: Platform, algorithm: str
) -> ExchangePrediction:
  """Predicts the exchange of all arrays of a layout at once."""
  plans = [array.plan for array in layout.arrays]
  phases = [_codec_seconds(plan, platform.device) for plan in plans]
  encode_s, recode_s, decode_s = (
    math.fsum(phase[i] for phase in phases) for i in range(3)
  )
  ledger = layout.ledger
  return ExchangePrediction(
    ledger,
    encode_s,
    _collectives.ledger_seconds(ledger, platform, algorithm=algorithm),
    recode_s,
    decode_s,
    sum(map(_memory_bytes, plans)),
  )


def _codec_seconds(
  plan: ArrayPlan, device: Device
) -> tuple[float, float, float]:
  """Predicts codec seconds before, between and after the collectives."""
  codec, size, workers = plan.codec, plan.like.size, plan.workers
  encode_s = _codecs.encode_seconds(codec, size, device)
  # Rounds of a codec's own are what it does when it encodes alone.
  if plan.method in ("sum", "rounds"):
    return encode_s, 0.0, _codecs.decode_seconds(codec, size, 1, device)
  if plan.method == "gather":
    return encode_s, 0.0, _codecs.decode_seconds(codec, size, workers, device)
  recode_s = _codecs.decode_seconds(codec, plan.part.size, workers, device)
  recode_s += _codecs.encode_seconds(codec, plan.part.size, device)
  return encode_s, recode_s, _codecs.decode_seconds(codec, size, 1, device)


def _memory_bytes(plan: ArrayPlan) -> int:
  """Counts the bytes of payloads and codec state that the exchange holds."""
  codec, like, workers = plan.codec, plan.like, plan.workers
  if plan.method == "rounds":
    messages = plan_messages(plan)
    gathered = [m.payload for m in messages if m.kind == "gather"]
    sent = [m.payload for m in messages]
    # What is sent, and as much that is received; of a gather, every payload.
    held = 2 * core.tree_bytes(sent) + (workers - 1) * core.tree_bytes(gathered)
    return _state_bytes(codec, like) + held
  if plan.method != "two_phase":
    received = workers if plan.method == "gather" else 0
    payload = core.tree_bytes(codec.payload_like(like))
    return _state_bytes(codec, like) + (1 + received) * payload
  # Two phases hold three sets of `workers` parts: those that are sent, those
  # that are received and those of the mean. Codec state is held for the array,
  # or for each row of it, and for the mean of the part that a worker encodes.
  parts = 3 * workers * core.tree_bytes(codec.payload_like(plan.part))
  if plan.encodes_rows:
    return (workers + 1) * _state_bytes(codec, plan.part) + parts
  return _state_bytes(codec, like) + _state_bytes(codec, plan.part) + parts


def _state_bytes(codec: codecs.Codec, like: ShapedLike) -> int:
  return core.tree_bytes(jax.eval_shape(codec.init, like))
