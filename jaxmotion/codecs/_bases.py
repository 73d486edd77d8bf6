"""Base classes of codecs, which check arguments and say what is the same."""

import abc
import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from jaxmotion import core, kernels
from jaxmotion.codecs import (
  _checks,
  _codec,
  _division,
  _laws,
  _partition,
  _rounds,
)
from jaxmotion.core import Array, PyTree, ShapedLike
from jaxmotion.kernels import blocks


def widen(like: ShapedLike) -> jax.ShapeDtypeStruct:
  """Returns the shape of an array, of float32."""
  return jax.ShapeDtypeStruct(like.shape, jnp.float32)


class ArrayCodec(_codec.Codec):
  """Codec without state, made of functions whose arguments are checked."""

  @abc.abstractmethod
  def _encode(self, x: Array, key: core.Key | None) -> PyTree:
    """Returns the payload; the key is not None if one is needed."""

  @abc.abstractmethod
  def _decode(self, payload: PyTree, like: ShapedLike) -> Array:
    """Returns the array of a payload."""

  def _sum_decoded(self, payloads: PyTree, like: ShapedLike) -> Array:
    return kernels.sum_decoded(self._decode, payloads, like)

  def _make_laws(self) -> _laws.Laws:
    return _laws.Laws()

  @property
  def laws(self) -> _laws.Laws:
    """The laws that the codec states of every array."""
    return self._make_laws()

  def encode(
    self, x: Array, state: PyTree = (), key: core.Key | None = None
  ) -> tuple[PyTree, PyTree]:
    """Returns the payload, and the state, which is ()."""
    self._check_input(x, key, state)
    return self._encode(x, key), state

  def decode(self, payload: PyTree, like: ShapedLike) -> Array:
    """Returns the array of a payload."""
    self._check_payload(payload, like)
    return self._decode(payload, like)

  def sum_decoded(self, payloads: PyTree, like: ShapedLike) -> Array:
    """Decodes the payloads of several workers and adds them."""
    self._check_payload(payloads, like, stacked=True)
    return self._sum_decoded(payloads, like)


@dataclasses.dataclass(frozen=True)
class BlockCodec(ArrayCodec):
  """Codec whose payload a kernel op computes in one pass over blocks."""

  @abc.abstractmethod
  def _make_op(self) -> kernels.BlockOp:
    """Returns the kernel op."""

  @functools.cached_property
  def kernel_op(self) -> kernels.BlockOp:
    """The kernel op of this codec, built once per codec."""
    # It is written to the instance's `__dict__`, as a frozen dataclass permits,
    # and is no field: `repr`, equality, hash and `config` do not see it.
    return self._make_op()

  @property
  def needs_key(self) -> bool:
    """Whether rounding is stochastic."""
    return self.kernel_op.needs_key

  def _encode(self, x: Array, key: core.Key | None) -> PyTree:
    return blocks.encode_pass(x, self._used_key(key), op=self.kernel_op)

  def _encode_error(
    self,
    x: Array,
    memory: kernels.ErrorMemory,
    state: PyTree,
    key: core.Key | None,
    decay: float,
  ) -> tuple[PyTree, Array, PyTree]:
    """Encodes x plus its error in the kernel op's own pass."""
    self._check_input(x, key, state)
    payload, value = blocks.encode_error_pass(
      x, memory, self._used_key(key), op=self.kernel_op, decay=decay
    )
    return payload, value, state

  def encode_mean(
    self,
    payloads: PyTree,
    like: ShapedLike,
    state: PyTree = (),
    key: core.Key | None = None,
  ) -> tuple[PyTree, PyTree]:
    """Encodes the mean of several workers' payloads, in the same pass."""
    self._check_payload(payloads, like, stacked=True)
    self._check_input(like, key, state)
    payload = blocks.mean_pass(
      payloads, self._used_key(key), op=self.kernel_op, like=like
    )
    return payload, state

  def _sum_decoded(self, payloads: PyTree, like: ShapedLike) -> Array:
    return blocks.sum_pass(payloads, op=self.kernel_op, like=like)

  def _decode(self, payload: PyTree, like: ShapedLike) -> Array:
    return blocks.decode_pass(payload, op=self.kernel_op, like=like)

  def _divide(
    self, like: ShapedLike, workers: int
  ) -> _division.Division | None:
    return _division.divide_blocks(self.kernel_op, like, workers)

  def _payload_like(self, like: ShapedLike) -> PyTree:
    return kernels.describe_payload(self.kernel_op, like)

  def _used_key(self, key: core.Key | None) -> core.Key | None:
    return key if self.needs_key else None


@dataclasses.dataclass(frozen=True)
class WrapperCodec(_codec.Codec):
  """Codec around another one, which says all that this one does not."""

  codec: _codec.Codec

  @property
  def needs_key(self) -> bool:
    """Whether the wrapped codec needs a key."""
    return self.codec.needs_key

  @property
  def laws(self) -> _laws.Laws:
    """The wrapped codec's law of elements that are not finite."""
    return _laws.Laws(nonfinite=self.codec.laws.nonfinite)

  def decode(self, payload: PyTree, like: ShapedLike) -> Array:
    """Decodes a payload with the wrapped codec."""
    return self.codec.decode(payload, like)

  def _count_dropped(self, payload: PyTree, like: ShapedLike) -> Array:
    return self.codec._count_dropped(payload, like)

  def _check_sharding(self, x: Any) -> None:
    self.codec._check_sharding(x)

  def _check_paths(self, paths: Sequence[str]) -> None:
    self.codec._check_paths(paths)


class MemoryCodec(WrapperCodec):
  """Codec around another one that remembers a part of every array.

  Its state is a NamedTuple, whose field `inner` is the wrapped codec's state.
  """

  _part: ClassVar[_laws.MemoryPart]

  @abc.abstractmethod
  def _read_part(self, state: Any) -> Array:
    """Returns what is remembered, float32 of the array's shape."""

  @abc.abstractmethod
  def _write_part(self, own: Array, mean: Array) -> Any:
    """Returns a state that remembers this, without the wrapped codec's."""

  @property
  def needs_mean(self) -> bool:
    """Whether the wrapped codec needs the mean."""
    return self.codec.needs_mean

  @core.declare(output=core.float_array)
  def after_reduce(self, state: Any, output: Array) -> Any:
    """Updates the wrapped codec's state."""
    self._check_state(state)
    return state._replace(inner=self.codec.after_reduce(state.inner, output))

  def canonical_state(self, state: Any) -> Any:
    """Returns the state with the wrapped codec's canonical state."""
    self._check_state(state)
    return state._replace(inner=self.codec.canonical_state(state.inner))

  @property
  def memory_parts(self) -> tuple[_laws.MemoryPart, ...]:
    """The part that it remembers, and those of the wrapped codec."""
    return _laws.nest_parts(self._part, self.codec.memory_parts)

  @core.declare(like=_checks.check_shaped)
  def read_memory(self, state: Any, like: ShapedLike) -> dict[str, Array]:
    """Returns what it remembers, and the wrapped codec's parts."""
    self._check_state(state, like)
    inner = self.codec.read_memory(state.inner, like)
    return {self._part.name: self._read_part(state), **inner}

  @_checks.declare_parts
  def write_memory(
    self,
    parts: Mapping[str, Array],
    means: Mapping[str, Array],
    like: ShapedLike,
    workers: int,
  ) -> Any:
    """Returns a state that remembers these parts."""
    _checks.check_parts(self, parts, means, like)
    own, mean = (a[self._part.name].astype(jnp.float32) for a in (parts, means))
    state = self._write_part(own, mean)
    inner = self.codec.write_memory(parts, means, like, workers)
    return state._replace(inner=inner)

  def _divide(
    self, like: ShapedLike, workers: int
  ) -> _division.Division | None:
    return self.codec.division(widen(like), workers)


class TreeCodec(_codec.Codec):
  """Codec of whole trees, which chooses a codec for each leaf."""

  @property
  def is_tree(self) -> bool:
    """True: the codec encodes trees."""
    return True

  @abc.abstractmethod
  def leaf_groups(
    self, leaves: Sequence[tuple[str, ShapedLike]]
  ) -> list[_codec.LeafGroup]:
    """Returns the arrays that the tree is encoded as, and their codecs."""

  def init(self, like: PyTree) -> PyTree:
    """Returns a list with the state of every array."""
    divided = _partition.partition(self, like)
    pairs = zip(divided.codecs, divided.array_likes(), strict=True)
    return [codec.init(a) for codec, a in pairs]

  def encode(
    self, x: PyTree, state: PyTree = (), key: core.Key | None = None
  ) -> tuple[PyTree, PyTree]:
    """Returns lists with the payload and the state of every array."""
    divided = _partition.partition(self, x)
    states = state if len(state) else [()] * len(divided.leaf_groups)
    arrays, keys = divided.split(x), divided.array_keys(key)
    coded = [
      codec.encode(array, s, k)
      for codec, array, s, k in zip(
        divided.codecs, arrays, states, keys, strict=True
      )
    ]
    return [p for p, _ in coded], [s for _, s in coded]

  def decode(self, payload: PyTree, like: PyTree) -> PyTree:
    """Decodes a list of payloads to a tree like `like`."""
    divided = _partition.partition(self, like)
    likes = divided.array_likes()
    triples = zip(divided.codecs, payload, likes, strict=True)
    return divided.merge([codec.decode(p, a) for codec, p, a in triples])


class MultiRoundCodec(_codec.Codec):
  """Reduces arrays over workers in rounds of its own.

  A subclass implements `round_kinds`, `reduce_in_rounds` and `decode`, and
  `init` if it has state. State that enters the mean has to be equal on all
  workers: mark it as `jaxmotion.Shared`, and make it from replies alone.

  Law: the mean over workers of `decode(sent)` is `mean`, for a codec that
  states `bounds_memory`. `testing.check_rounds` checks it.

  Such codecs are for `all_reduce` and `exchange`, alone or inside of
  `feedback`, `rules`, `buckets` and, as the last one, `chain`.

  Example:
    >>> from jaxmotion import codecs
    >>> class greatest(MultiRoundCodec):  # The workers' greatest elements.
    ...   round_kinds = ("max",)
    ...   def reduce_in_rounds(self, x, state, key, workers):
    ...     reply = yield codecs.Message("max", x)
    ...     return codecs.Reduced(reply, x, state)
    ...   def decode(self, payload, like):
    ...     return payload
    >>> greatest().encode(jnp.ones(2))[0].tolist()
    [1.0, 1.0]
  """

  @property
  @abc.abstractmethod
  def round_kinds(self) -> tuple[str, ...]:
    """Kinds of the messages, in order: of "sum", "max", "gather", ..."""

  @abc.abstractmethod
  def reduce_in_rounds(
    self, x: Array, state: PyTree, key: core.Key | None, workers: int
  ) -> _rounds.Rounds[_rounds.Reduced]:
    """Yields what is sent, is sent what came, and returns the mean."""

  def encode(
    self, x: Array, state: PyTree = (), key: core.Key | None = None
  ) -> tuple[PyTree, PyTree]:
    """Encodes an array as a worker does that has no others."""
    self._check_input(x, key)
    rounds = self.reduce_in_rounds(x, state, key, 1)
    try:
      message = next(rounds)
      while True:
        message = rounds.send(_rounds.stand_in_reply(message, 1))
    except StopIteration as stop:
      return stop.value.sent, stop.value.state
