"""Plan of an exchange: a codec and a collective for each tensor."""

import dataclasses
import functools
from collections.abc import Mapping
from typing import NamedTuple

from jaxmotion import codecs, core, perfmodel
from jaxmotion.planner import _text
from jaxmotion.planner.exchange import _algorithms, _problem

# An algorithm is named beside the plan if its step takes less than this share.
_MUCH = 0.9


class TensorChoice(NamedTuple):
  """The codec and the collective of one tensor.

  Args:
    path: path of the tensor ("dense/kernel").
    shape: shape of the tensor.
    codec: codec of its gradient; `identity()` if it is not compressed.
    method: "sum", "gather" or "two_phase".
    axis_bytes: bytes that a worker sends of it by axis, the slowest first.
    error: relative error of encoding the tensor once.
    reason: one sentence.

  Example:
    >>> from jaxmotion.codecs import identity
    >>> choice = TensorChoice("w", (8,), identity(), "sum", {}, 0.0, "Small.")
    >>> choice.is_compressed
    False
  """

  path: str
  shape: tuple[int, ...]
  codec: codecs.Codec
  method: str
  axis_bytes: Mapping[str, float]
  error: float
  reason: str

  @property
  def is_compressed(self) -> bool:
    """Whether the tensor does not travel at full precision."""
    return self.codec != codecs.identity()


@dataclasses.dataclass(frozen=True, eq=False)
class ExchangePlan:
  """A codec and a collective for each tensor of an exchange, with reasons.

  `jaxmotion.exchange(mesh_axis, plan.codec, method=plan.method)` carries the
  plan out. All seconds are predicted.

  Args:
    reason: one sentence; it starts with "Do not compress" if nothing pays.
    choices: one choice for each tensor, in the order of the tree.
    codec: codec of the exchange: `identity()`, one codec, or `rules` by path.
    method: method of the exchange; None is its own choice.
    step: predicted step.
    uncompressed: predicted step without compression.
    uniform_s: seconds of the step with one codec for all tensors, whether or
      not its error fits in the budget.
    error: relative error of encoding the whole gradient once; a bound on it
      if no gradients were given.
    problem: problem that the plan solves, for `replan`.

  Example:
    >>> import jax
    >>> from jaxmotion import codecs, perfmodel, planner
    >>> w = jax.ShapeDtypeStruct((1024, 1024), "float32")
    >>> traced = perfmodel.trace_step(lambda w, x: (x @ w).sum(), w, (w,))
    >>> cluster = perfmodel.builtin_platform("ethernet_1gbit")
    >>> half = [codecs.cast("bfloat16")]
    >>> plan = planner.advise(traced, w, (), cluster, candidates=half)
    >>> plan.is_compressed, plan.step.total_s < 0.6 * plan.uncompressed.total_s
    (True, True)
  """

  reason: str
  choices: tuple[TensorChoice, ...]
  codec: codecs.Codec
  method: str | None
  step: perfmodel.StepPrediction
  uncompressed: perfmodel.StepPrediction
  uniform_s: Mapping[codecs.Codec, float]
  error: float
  problem: _problem.ExchangeProblem = dataclasses.field(repr=False)

  @property
  def is_compressed(self) -> bool:
    """Whether any tensor is compressed."""
    return any(choice.is_compressed for choice in self.choices)

  @property
  def platform(self) -> perfmodel.Platform:
    """Platform of the predictions; after `replan`, the corrected one."""
    return self.problem.platform

  @functools.cached_property
  def algorithms(self) -> _algorithms.AlgorithmTable:
    """All exchanges of the library on this platform, the fastest step first.

    They are the plan itself, its exchange one step late, exchanges every few
    steps, the presets, and optimizers that workers divide. An algorithm is not
    offered if the loss breaks its assumptions, if the device has too little
    memory, or if it refuses the parameters. One that sends no fewer bytes is
    not offered either. Its note says which. Errors are not weighed: no bound on
    one step tells what an algorithm does to a loss.

    Each has a `name`, the expression that makes it, and a `note`. Its `step_s`
    and `axis_bytes` are averages over steps; None and {} if it is not offered
    (`is_offered`).
    """
    return _algorithms.weigh_algorithms(
      self.problem, self.step, self.uncompressed
    )

  @property
  def refusal(self) -> str | None:
    """Says why the plan does not fit the device; None if it fits."""
    return self.problem.explain_memory(self.step.memory_bytes)

  @property
  def alternative(self) -> _algorithms.AlgorithmChoice | None:
    """The fastest algorithm, if the plan does not fit or takes far longer.

    None if the step of no algorithm takes less than 0.9 of the plan's: the plan
    changes less of training.
    """
    best = self.algorithms[0]
    if best.step_s is None:
      return None
    is_near = best.step_s >= _MUCH * self.step.total_s
    return None if is_near and self.refusal is None else best

  def __str__(self) -> str:
    places = _text.name_places(self.step.axis_bytes, "wire")
    rows = [("tensor", "codec", "method", *places, "error", "reason")]
    for path, _, codec, method, axis_bytes, error, reason in self.choices:
      sent = map(_text.format_bytes, axis_bytes.values())
      name = _text.format_codec(codec)
      rows.append((path, name, method, *sent, f"{error:.2g}", reason))
    head = [self.reason]
    other = self.alternative
    if refusal := self.refusal:
      best = (
        f"The fastest that fits is `{other.name}`" if other else "None fits"
      )
      head.append(f"It does not fit: it {refusal}. {best}.")
    elif other and other.step_s:
      head.append(
        f"`{other.name}` would take {_text.format_seconds(other.step_s)} a "
        f"step. {other.note}"
      )
    tables = core.text_table(rows), str(self.algorithms)
    return "\n\n".join(["\n".join(head), *tables])
