"""The codec `chain`, which encodes one codec's values with another."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxmotion import core, kernels
from jaxmotion.codecs import _bases, _checks, _codec, _laws, _rounds
from jaxmotion.codecs._arrays import _floats, _linear
from jaxmotion.codecs._combinators import _feedback
from jaxmotion.core import Array, PyTree, ShapedLike
from jaxmotion.kernels import blocks
from jaxmotion.kernels.rotate import RotateOp


@dataclasses.dataclass(frozen=True, init=False)
class chain(_codec.Codec):
  """Encodes the values of each codec's payload with the next codec.

  encode = the first codec's payload, its `values` field replaced by the second
  codec's payload of it, and so on; decode undoes them in reverse.

  Properties: the error is the first codec's plus what the others add to its
  values; unbiased if all are.

  Args:
    *codecs: two or more; the payload of each but the last has a floating-point
      field `values` (`topk`, `random_k`, `threshold`, `rotate`, `identity`).

  Example:
    >>> from jaxmotion import codecs
    >>> codec = codecs.chain(codecs.topk(density=0.25), codecs.cast("bfloat16"))
    >>> x = jnp.array([1.0, -2.5, 0.5, 0.1])
    >>> payload, _ = codec.encode(x)
    >>> codec.decode(payload, x).tolist()
    [0.0, -2.5, 0.0, 0.0]
  """

  codecs: tuple[_codec.Codec, ...]

  def __init__(self, *codecs: _codec.Codec) -> None:
    """Raises unless each codec can encode the values of the one before."""
    if len(codecs) < 2:
      raise ValueError(
        f"`codecs` must be two codecs or more, got {len(codecs)}."
      )
    for codec in codecs:
      if not isinstance(codec, _codec.Codec) or codec.is_tree:
        raise TypeError(f"`codecs` must be codecs of arrays, got {codec!r}.")
      if isinstance(codec, _feedback.feedback):
        raise ValueError(
          "`codecs` must hold no feedback (wrap the chain in it instead), "
          f"got {codec!r}."
        )
    for codec in codecs[:-1]:
      if codec.round_kinds:
        raise ValueError(
          f"`codecs` must have a codec of several rounds last, got {codec!r}."
        )
      if codecs[-1].round_kinds and not (codec.linear and not codec.has_state):
        raise ValueError(
          "`codecs` must be linear before a codec of several rounds "
          f"(`identity`, `rotate`), got {codec!r}."
        )
    object.__setattr__(self, "codecs", codecs)

  @classmethod
  def _from_fields(cls, fields: dict[str, Any]) -> "chain":
    return cls(*fields["codecs"])

  def __repr__(self) -> str:
    return f"chain({', '.join(map(repr, self.codecs))})"

  @property
  def laws(self) -> _laws.Laws:
    """The laws that all of the codecs keep, one after another."""
    return _laws.chain_laws([codec.laws for codec in self.codecs])

  def _count_dropped(self, payload: PyTree, like: ShapedLike) -> Array:
    dropped = jnp.uint32(0)
    for codec, a in zip(self.codecs, self._input_likes(like), strict=True):
      dropped = dropped + codec._count_dropped(payload, a)
      payload = getattr(payload, "values", None)
    return dropped

  @property
  def needs_key(self) -> bool:
    """Whether any of the codecs needs a key."""
    return any(codec.needs_key for codec in self.codecs)

  @property
  def keeps_dtype(self) -> bool:
    """Whether all of the codecs keep the dtype."""
    return all(codec.keeps_dtype for codec in self.codecs)

  @core.declare(like=_checks.check_shaped)
  def init(self, like: ShapedLike) -> tuple[Any, ...]:
    """Returns the codecs' states; `()` if none has any."""
    states = tuple(
      codec.init(a)
      for codec, a in zip(self.codecs, self._input_likes(like), strict=True)
    )
    return states if jax.tree.leaves(states) else ()

  def init_rounds(self, like: ShapedLike, workers: int) -> tuple[Any, ...]:
    """Returns the codecs' states; the last one's is that of its rounds."""
    states = self.init(like)
    last = self.codecs[-1].init_rounds(self._input_likes(like)[-1], workers)
    return (*states[:-1], last) if states else ()

  def _check_sharding(self, x: Any) -> None:
    """Raises if one of the codecs cannot encode a sharded array."""
    for codec in self.codecs:
      codec._check_sharding(x)

  def encode(
    self, x: Array, state: PyTree = (), key: core.Key | None = None
  ) -> tuple[PyTree, PyTree]:
    """Returns the nested payload and the states."""
    self._check_input(x, key)
    self._check_state(state)
    if self._fused_op is not None:
      payload = blocks.encode_pass(x, self._last_key(key), op=self._fused_op)
      return _floats.Values(payload), state
    states = state or ((),) * len(self.codecs)
    outer, new_states, x = self._encode_heads(x, states, key)
    own_key = self._fold_key(key, len(outer))
    payload, last = self.codecs[-1].encode(x, states[-1], own_key)
    return _nest(outer, payload), (*new_states, last) if state else ()

  def _encode_heads(
    self, x: Array, states: Sequence[PyTree], key: core.Key | None
  ) -> tuple[list[PyTree], list[PyTree], Array]:
    """Runs all codecs but the last: payloads, states, values for the last."""
    outer, new_states = [], []
    for i, codec in enumerate(self.codecs[:-1]):
      payload, state = codec.encode(x, states[i], self._fold_key(key, i))
      outer.append(payload)
      new_states.append(state)
      x = _payload_values(codec, payload)
    return outer, new_states, x

  def _encode_error(
    self,
    x: Array,
    memory: kernels.ErrorMemory,
    state: PyTree,
    key: core.Key | None,
    decay: float,
  ) -> tuple[PyTree, Array, PyTree]:
    """Encodes x plus its error in one pass if a rotation is fused."""
    if self._fused_op is None or not jax.tree.leaves(memory.sent):
      return super()._encode_error(x, memory, state, key, decay)
    self._check_input(x, key)
    self._check_state(state)
    memory = memory._replace(sent=memory.sent.values)
    payload, value = blocks.encode_error_pass(
      x, memory, self._last_key(key), op=self._fused_op, decay=decay
    )
    return _floats.Values(payload), value, state

  def decode(self, payload: PyTree, like: ShapedLike) -> Array:
    """Decodes the values from the last codec back to the first."""
    self._check_payload(payload, like)
    *heads, last = self.codecs
    likes = self._input_likes(like)
    outer, payload = unnest(payload, len(heads))
    x = last.decode(payload, likes[-1])
    return decode_heads(heads, outer, x, likes[:-1])

  @property
  def round_kinds(self) -> tuple[str, ...]:
    """Kinds of the last codec's messages."""
    return self.codecs[-1].round_kinds

  def reduce_in_rounds(
    self, x: Array, state: PyTree, key: core.Key | None, workers: int
  ) -> _rounds.Rounds[_rounds.Reduced]:
    """Runs the last codec's rounds on what the linear codecs make of x."""
    self._check_input(x, key)
    self._check_state(state)
    likes = self._input_likes(x)
    *heads, last = self.codecs
    states = state or ((),) * len(self.codecs)
    outer, _, x = self._encode_heads(x, states, key)
    own_key = self._fold_key(key, len(heads))
    reduced = yield from last.reduce_in_rounds(x, states[-1], own_key, workers)
    mean = decode_heads(heads, outer, reduced.mean, likes[:-1])
    new = (*states[:-1], reduced.state) if state else ()
    return _rounds.Reduced(mean, _nest(outer, reduced.sent), new)

  @core.declare(like=_checks.check_shaped)
  def sum_decoded(self, payloads: PyTree, like: ShapedLike) -> Array:
    """Decodes and adds payloads; linear codecs decode the sum alone, once."""
    *heads, last = self.codecs
    is_narrow = jnp.finfo(like.dtype).bits < 32  # Sums are made in float32.
    if is_narrow or not all(codec.linear for codec in heads):
      return super().sum_decoded(payloads, like)
    self._check_payload(payloads, like, stacked=True)
    likes = self._input_likes(like)
    outer, payloads = unnest(payloads, len(heads))
    total = last.sum_decoded(payloads, likes[-1])
    return decode_heads(heads, outer, total, likes[:-1])

  @functools.cached_property
  def _fused_op(self) -> RotateOp | None:
    """One kernel op for a rotation and the block pass that follows it."""
    first, last = self.codecs[0], self.codecs[-1]
    if len(self.codecs) > 2 or not isinstance(last, _bases.BlockCodec):
      return None
    if not isinstance(first, _linear.rotate):
      return None
    return RotateOp(op=last.kernel_op, length=first.block, seed=first.seed)

  def _check_state(self, state: Any, like: ShapedLike | None = None) -> None:
    fits = isinstance(state, tuple) and len(state) in (0, len(self.codecs))
    _checks.check_state(self, state, fits)

  def _last_key(self, key: core.Key | None) -> core.Key | None:
    """Returns the last codec's key, None if it needs none."""
    needs_key = self.codecs[-1].needs_key
    return self._fold_key(key, len(self.codecs) - 1) if needs_key else None

  def _fold_key(self, key: core.Key | None, i: int) -> core.Key | None:
    return None if key is None else key.fold(i)

  def _input_likes(self, like: ShapedLike) -> list[jax.ShapeDtypeStruct]:
    """Returns the shape and dtype that each codec encodes."""
    likes = [core.shape_dtype(like)]
    for codec in self.codecs[:-1]:
      likes.append(_payload_values(codec, codec.payload_like(likes[-1])))
    return likes


def unnest(payload: PyTree, count: int) -> tuple[list[PyTree], PyTree]:
  """Takes a chain's payload apart: those of `count` heads, and the next one."""
  outer = []
  for _ in range(count):
    outer.append(payload)
    payload = payload.values
  return outer, payload


def decode_heads(
  heads: Sequence[_codec.Codec],
  outer: Sequence[PyTree],
  x: Array,
  likes: Sequence[ShapedLike],
) -> Array:
  """Decodes values by the codecs at a chain's head, the last one first."""
  for codec, payload, like in zip(
    heads[::-1], outer[::-1], likes[::-1], strict=True
  ):
    x = codec.decode(payload._replace(values=x), like)
  return x


def _nest(outer: Sequence[PyTree], payload: PyTree) -> PyTree:
  """Makes a chain's payload: each head's, whose values are the next one's."""
  for own in outer[::-1]:
    payload = own._replace(values=payload)
  return payload


def _payload_values(codec: _codec.Codec, payload: PyTree) -> Any:
  """Returns the values of a payload, which the next codec is to encode."""
  if not hasattr(getattr(payload, "values", None), "dtype"):
    raise TypeError(
      "`codecs` must have payloads with a field `values`, all but the last; "
      f"got {codec!r}, whose payload is {type(payload).__name__}."
    )
  return payload.values
