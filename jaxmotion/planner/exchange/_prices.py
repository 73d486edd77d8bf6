"""Predicted costs of exchanging one tensor at a time."""

from __future__ import annotations

from typing import Any

import jax

from jaxmotion import perfmodel, wire
from jaxmotion.codecs import Codec, cast, rules
from jaxmotion.collectives.extend import is_summed
from jaxmotion.core import PyTree, ShapedLike
from jaxmotion.perfmodel.extend import move_seconds
from jaxmotion.planner.exchange import _problem


class TensorCosts:
  """Exchange predictions of single tensors, each computed once.

  Args:
    problem: platform, axes and algorithm of the exchange.
  """

  def __init__(self, problem: _problem.ExchangeProblem):
    self.problem = problem
    self._known: dict[tuple[Any, ...], perfmodel.ExchangePrediction] = {}

  def predict_tensor(
    self,
    codec: Codec,
    like: jax.ShapeDtypeStruct,
    method: str | None,
    mixed: bool,
  ) -> perfmodel.ExchangePrediction:
    """Predicts the exchange of one tensor."""
    summed = is_summed(codec, like)
    joins_others = summed and mixed and self.problem.workers == 2
    method = "gather" if summed else method
    key = codec, like.shape, str(like.dtype), method, joins_others
    if key not in self._known:
      predict = self._predict_joined if joins_others else self._predict_alone
      self._known[key] = predict(codec, like, method)
    return self._known[key]

  def collective_seconds(self, kind: wire.Move, nbytes: int) -> float:
    """Returns the seconds of one collective of `nbytes` payload bytes."""
    move = kind._replace(payload_bytes=nbytes)
    return move_seconds(move, self.problem.platform, "ring")

  def _predict_alone(
    self, codec: Codec, tree: PyTree, method: str | None
  ) -> perfmodel.ExchangePrediction:
    return perfmodel.predict_exchange(
      tree,
      self.problem.platform,
      self.problem.mesh_axis,
      codec,
      method=method,
    )

  def _predict_joined(
    self, codec: Codec, like: ShapedLike, method: str | None
  ) -> perfmodel.ExchangePrediction:
    """Predicts what a summed tensor adds to an exchange that gathers."""
    # The cost of one more tensor is a difference. It is the exchange of the
    # tensor beside one bfloat16 element, which is not summed, minus that
    # element's own.
    unsummed, element = cast("bfloat16"), jax.ShapeDtypeStruct((1,), "float32")
    codecs = rules((("0", codec), ("1", unsummed)))
    both = self._predict_alone(codecs, (like, element), method)
    other = self._predict_alone(unsummed, element, method)
    payload = {collective_kind(m): m.payload_bytes for m in both.ledger.moves}
    for move in other.ledger.moves:
      payload[collective_kind(move)] -= move.payload_bytes
    moves = [k._replace(payload_bytes=n) for k, n in payload.items() if n]
    return both._replace(
      ledger=wire.Ledger(tuple(moves)),
      encode_s=both.encode_s - other.encode_s,
      recode_s=both.recode_s - other.recode_s,
      decode_s=both.decode_s - other.decode_s,
    )


def collective_kind(move: wire.Move) -> wire.Move:
  """Returns the collective that a move is a part of, without its bytes."""
  return move._replace(payload_bytes=0)
