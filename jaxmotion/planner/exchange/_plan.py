"""The advice: a codec and a collective for each tensor, with reasons."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import NamedTuple

from jaxmotion.codecs import Codec, identity
from jaxmotion.perfmodel import Platform, StepPrediction
from jaxmotion.planner._text import format_bytes, format_codec
from jaxmotion.planner.exchange._problem import ExchangeProblem


class TensorChoice(NamedTuple):
  """What a plan says of one tensor.

  Args:
    path: of the tensor ("dense/kernel").
    shape: of the tensor.
    codec: encodes it; `identity()` if it is not compressed.
    method: "sum", "gather" or "two_phase".
    wire_bytes: that a worker sends of it.
    error: relative, of encoding it once.
    reason: one sentence.

  Example:
    >>> from jaxmotion.codecs import identity
    >>> plain = TensorChoice("w", (8,), identity(), "sum", 48.0, 0.0, "Small.")
    >>> plain.compresses
    False
  """

  path: str
  shape: tuple[int, ...]
  codec: Codec
  method: str
  wire_bytes: float
  error: float
  reason: str

  @property
  def compresses(self) -> bool:
    """Whether it does not travel as it is."""
    return self.codec != identity()


@dataclasses.dataclass(frozen=True, eq=False)
class ExchangePlan:
  """Which codec and collective each tensor gets, and why.

  `jaxmotion.exchange("data", plan.codec, method=plan.method)` does it. All
  seconds are predicted.

  Args:
    reason: one sentence; it starts with "Do not compress" if nothing pays.
    choices: one for each tensor, in the order of the tree.
    codec: of the exchange: `identity()`, one codec, or `rules` by path.
    method: of the exchange; None is its own choice.
    step: predicted.
    plain: predicted without compression.
    uniform: seconds of the step with one codec for all tensors, whether or
      not its error fits in the budget.
    error: relative, of encoding the whole gradient once; a bound on it where
      no gradients were given.
    request: what was asked.

  Example:
    >>> import jax
    >>> from jaxmotion import codecs, perfmodel, planner
    >>> w = jax.ShapeDtypeStruct((1024, 1024), "float32")
    >>> own = perfmodel.trace_step(lambda w, x: (x @ w).sum(), w, (w,))
    >>> cluster = perfmodel.builtin_platform("ethernet_1gbit")
    >>> half = [codecs.cast("bfloat16")]
    >>> plan = planner.advise(own, w, (), cluster, candidates=half)
    >>> plan.compresses, plan.step.total_s < 0.6 * plan.plain.total_s
    (True, True)
  """

  reason: str
  choices: tuple[TensorChoice, ...]
  codec: Codec
  method: str | None
  step: StepPrediction
  plain: StepPrediction
  uniform: Mapping[Codec, float]
  error: float
  request: ExchangeProblem = dataclasses.field(repr=False)

  @property
  def compresses(self) -> bool:
    """Whether any tensor is compressed."""
    return any(choice.compresses for choice in self.choices)

  @property
  def platform(self) -> Platform:
    """What it was predicted for; after `replan`, corrected."""
    return self.request.route.platform

  def __str__(self) -> str:
    rows = [("tensor", "codec", "method", "wire", "error", "reason")]
    rows += [
      (
        choice.path,
        format_codec(choice.codec),
        choice.method,
        format_bytes(choice.wire_bytes),
        f"{choice.error:.2g}",
        choice.reason,
      )
      for choice in self.choices
    ]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
      "  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)).rstrip()
      for row in rows
    ]
    return "\n".join([self.reason, "", *lines])
