"""The exchange of one tensor at a time."""

from __future__ import annotations

import jax

from jaxmotion.codecs import Codec, cast, rules
from jaxmotion.core import PyTree, ShapedLike
from jaxmotion.perfmodel import (
  ExchangePrediction,
  ledger_seconds,
  predict_exchange,
)
from jaxmotion.planner.exchange._buckets import Route
from jaxmotion.wire import Ledger, Move


class TensorCosts:
  """The exchange of one tensor at a time, each predicted once.

  Args:
    route: how gradients travel.
  """

  def __init__(self, route: Route):
    self.route = route
    self._axis = route.platform.axis(route.axis)
    self._known: dict[tuple, ExchangePrediction] = {}

  def price(
    self,
    codec: Codec,
    like: jax.ShapeDtypeStruct,
    method: str | None,
    mixed: bool,
  ) -> ExchangePrediction:
    """Predicts the exchange of a tensor.

    Args:
      codec: of the tensor.
      like: shape and dtype of the tensor.
      method: "gather", "two_phase" or the exchange's own choice, if it is not
        summed.
      mixed: whether others are not summed. Between two workers, small sums
        then go with them.
    """
    beside = codec.summable and mixed and self._axis.workers == 2
    method = "gather" if codec.summable else method
    key = codec, like.shape, str(like.dtype), method, beside
    if key not in self._known:
      predict = self._beside if beside else self._alone
      self._known[key] = predict(codec, like, method)
    return self._known[key]

  def link_seconds(self, kind: Move, nbytes: int) -> float:
    """Seconds of one collective of so many bytes."""
    ledger = Ledger((kind._replace(payload_bytes=nbytes),))
    route = self.route
    return ledger_seconds(ledger, route.platform, algorithm=route.algorithm)

  def _alone(
    self, codec: Codec, tree: PyTree, method: str | None
  ) -> ExchangePrediction:
    route = self.route
    return predict_exchange(
      tree,
      route.platform,
      route.axis,
      codec,
      method=method,
      local_axis=route.local_axis,
      algorithm=route.algorithm,
    )

  def _beside(
    self, codec: Codec, like: ShapedLike, method: str | None
  ) -> ExchangePrediction:
    """What a tensor adds to an exchange that is not a sum."""
    words, one = cast("bfloat16"), jax.ShapeDtypeStruct((1,), "float32")
    codecs = rules((("0", codec), ("1", words)))
    both = self._alone(codecs, (like, one), method)
    other = self._alone(words, one, method)
    left = {kind_of(m): m.payload_bytes for m in both.ledger.moves}
    for move in other.ledger.moves:
      left[kind_of(move)] -= move.payload_bytes
    moves = [k._replace(payload_bytes=n) for k, n in left.items() if n]
    return both._replace(
      ledger=Ledger(tuple(moves)),
      encode_s=both.encode_s - other.encode_s,
      recode_s=both.recode_s - other.recode_s,
      decode_s=both.decode_s - other.decode_s,
    )


def kind_of(move: Move) -> Move:
  """The collective that a move is a part of."""
  return move._replace(payload_bytes=0)
