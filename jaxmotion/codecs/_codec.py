"""The base class of codecs."""

import abc
import dataclasses
import functools
import inspect
from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp

from jaxmotion import core, kernels
from jaxmotion.codecs import _arguments, _division, _laws, _rounds
from jaxmotion.core import Array, PyTree, ShapedLike


class LeafGroup(NamedTuple):
  """Leaves of a tree that are encoded as one array, and the codec for it.

  Attributes:
    leaves: positions of the leaves; more than one are concatenated.
    codec: encodes the array.
  """

  leaves: tuple[int, ...]
  codec: "Codec"


@dataclasses.dataclass(frozen=True)
class Codec(abc.ABC):
  """Turns an array into a payload of machine words and back.

  A codec is its configuration: a frozen dataclass of plain Python values, which
  are compared by value. `repr` shows it in full; `config` and `from_config`
  turn it into a dict and back. It holds no arrays; what it remembers between
  calls is the `state` that `init` makes and `encode` returns.

  A subclass implements `encode` and `decode`, and `init` if it has state. It
  must make a payload that is a pytree of arrays whose shapes depend only on
  the shape and dtype of `x`.

  Attributes:
    summable: whether payloads of several workers may be added, field by field,
      before decoding. Such payloads go through the stock all-reduce: their
      floating-point fields are summed and their integer fields are the same
      on every worker.
    linear: whether the payload's `values` are a linear map of the array, the
      same on all workers, that `decode` inverts. So a sum of several workers'
      values decodes to the sum of their arrays.
    needs_key: whether `encode` makes random choices.

  Example:
    >>> import dataclasses
    >>> from jaxmotion import codecs
    >>> @dataclasses.dataclass(frozen=True)
    ... class upper_half(Codec):
    ...   def encode(self, x, state=(), key=None):
    ...     bits = jax.lax.bitcast_convert_type(x.astype("float32"), "uint32")
    ...     return (bits >> 16).astype("uint16"), state
    ...   def decode(self, payload, like):
    ...     bits = payload.astype("uint32") << 16
    ...     return jax.lax.bitcast_convert_type(bits, "float32")
    >>> codec = codecs.chain(codecs.topk(density=0.5), upper_half())
    >>> payload, _ = codec.encode(jnp.array([0.1, 1.5, -2.0, 0.2]))
    >>> codec.decode(payload, jnp.zeros(4)).tolist()
    [0.0, 1.5, -2.0, 0.0]
  """

  summable: ClassVar[bool] = False
  linear: ClassVar[bool] = False

  def __init_subclass__(cls, **kwargs: Any) -> None:
    """Refuses a class of your own that has the name of a codec of this
    package."""
    super().__init_subclass__(**kwargs)
    own = {kind.__name__ for kind in codec_types() if is_own(kind)}
    if cls.__name__ in own and not is_own(cls):
      raise TypeError(
        "`name` of a codec class must be none of a codec of jaxmotion, got "
        f"{cls.__name__!r}: give the class another name."
      )

  @property
  def needs_key(self) -> bool:
    """Whether `encode` needs a key, because it makes random choices."""
    return False

  @property
  def laws(self) -> _laws.Laws:
    """The laws that the codec states of every array: by default none."""
    return _laws.Laws()

  @property
  def keeps_dtype(self) -> bool:
    """Whether the payload holds words of the array's own dtype.

    Other codecs compute in float32, in which a float64 element may be infinite.
    An exchange hands them float32, and adds up
    decoded payloads before it rounds to a narrower dtype.
    """
    return False

  @property
  def round_kinds(self) -> tuple[str, ...]:
    """Kinds of the messages that `reduce_in_rounds` sends; () for none.

    Most codecs have none: the collective encodes, sends and decodes.
    """
    return ()

  @property
  def is_tree(self) -> bool:
    """Whether the codec encodes trees rather than arrays."""
    return False

  @property
  def has_state(self) -> bool:
    """Whether it remembers anything between calls, such as error memory."""
    return _has_state(self)

  def init(self, like: ShapedLike) -> PyTree:
    """Returns the state for an array of this shape and dtype.

    Args:
      like: array or ShapeDtypeStruct.

    Returns:
      A pytree of arrays; `()` for a codec that remembers nothing.
    """
    _arguments.check_shaped("like", like)
    return ()

  def init_rounds(self, like: ShapedLike, workers: int) -> PyTree:
    """Returns the state of a codec that has `round_kinds`.

    Args:
      like: array or ShapeDtypeStruct.
      workers: number of workers, on which its shapes may depend.
    """
    core.check_int("workers", workers, 1, 2**31 - 1)
    return self.init(like)

  @abc.abstractmethod
  def encode(
    self, x: Array, state: PyTree = (), key: core.Key | None = None
  ) -> tuple[PyTree, PyTree]:
    """Encodes one array to a payload.

    Args:
      x: floating-point array of any shape.
      state: what `init` or the last `encode` returned.
      key: randomness, for a codec with `needs_key`.

    Returns:
      The payload and the new state.

    Raises:
      TypeError: `x` is not a floating-point array.
      ValueError: the codec needs a key and got none.
    """

  @abc.abstractmethod
  def decode(self, payload: PyTree, like: ShapedLike) -> Array:
    """Decodes a payload to an array.

    Args:
      payload: what `encode` made.
      like: the shape and dtype of the array that was encoded.

    Returns:
      An array of that shape and dtype.

    Raises:
      ValueError: the payload is not one of an array like that.
    """

  def count_dropped(self, payload: PyTree, like: ShapedLike) -> Array:
    """Returns the number of elements that found no slot in the payload.

    The codec's `laws` hold where it is 0.

    Args:
      payload: what `encode` made.
      like: the shape and dtype of the array that was encoded.

    Returns:
      uint32[], 0 for codecs that have a slot for every element that they send.

    Raises:
      ValueError: the payload is not one of an array like that.
    """
    self._check_payload(payload, like)
    return self._count_dropped(payload, like)

  def _count_dropped(self, payload: PyTree, like: ShapedLike) -> Array:
    del payload, like
    return jnp.uint32(0)

  def encode_error(
    self,
    x: Array,
    memory: kernels.ErrorMemory,
    state: PyTree = (),
    key: core.Key | None = None,
    *,
    decay: float = 1.0,
  ) -> tuple[PyTree, Array, PyTree]:
    """Encodes one array plus its remembered error.

    Args:
      x: floating-point array of any shape.
      memory: the last value and its payload.
      state: what `init` or the last `encode` returned.
      key: randomness, for a codec with `needs_key`.
      decay: factor on the error.

    Returns:
      The payload, the value it encodes (float32) and the new state.
    """
    _arguments.check_error_memory(x, memory, decay)
    value = kernels.add_error(self.decode, x, memory, decay)
    payload, state = self.encode(value, state, key)
    return payload, value, state

  def sum_decoded(self, payloads: PyTree, like: ShapedLike) -> Array:
    """Decodes payloads of several workers and adds them, in their order.

    Args:
      payloads: a payload whose leaves have a leading axis of workers.
      like: shape and dtype of the array that each of them encoded.

    Returns:
      The sum, in float32 or the wider dtype of `like`.

    Example:
      >>> from jaxmotion import codecs
      >>> codec, x = codecs.cast("bfloat16"), jnp.ones(2)
      >>> payload, _ = codec.encode(x)
      >>> both = jax.tree.map(lambda a: jnp.stack([a, a]), payload)
      >>> codec.sum_decoded(both, x).tolist()
      [2.0, 2.0]
    """
    return kernels.sum_decoded(self.decode, payloads, like)

  def encode_mean(
    self,
    payloads: PyTree,
    like: ShapedLike,
    state: PyTree = (),
    key: core.Key | None = None,
  ) -> tuple[PyTree, PyTree]:
    """Encodes the mean of several workers' decoded payloads.

    Args:
      payloads: a payload whose leaves have a leading axis of workers.
      like: shape and dtype of the array that each worker encoded.
      state: state of the encoding of the mean.
      key: randomness, for a codec with `needs_key`.

    Returns:
      The payload and the new state.
    """
    workers = jax.tree.leaves(payloads)[0].shape[0]
    mean = self.sum_decoded(payloads, like) / workers
    return self.encode(mean.astype(like.dtype), state, key)

  def reduce_in_rounds(
    self, x: Array, state: PyTree, key: core.Key | None, workers: int
  ) -> _rounds.Rounds[_rounds.Reduced]:
    """Reduces an array over workers, for codecs that have `round_kinds`.

    It is a generator, which yields a `Message` in each round and is sent the
    reply. Kinds and shapes may depend on the shape of `x` and on the number of
    workers alone.

    Args:
      x: floating-point array, this worker's own.
      state: what `init` or the last call returned.
      key: randomness, for a codec with `needs_key`.
      workers: number of workers.

    Returns:
      The mean, what this worker sent of it, and the new state.
    """
    raise NotImplementedError(f"{type(self).__name__} has no rounds.")

  def after_reduce(self, state: PyTree, output: Array) -> PyTree:
    """Updates the state after the collective, from the mean over workers.

    Global error feedback needs that mean; other codecs keep their state.

    Args:
      state: what `encode` returned.
      output: the decoded mean over workers, of the shape of `x`.
    """
    core.check_float("output", output)
    self._check_state(state)
    return state

  def division(
    self, like: ShapedLike, workers: int
  ) -> _division.Division | None:
    """Returns how payloads are divided between workers, or None.

    If it is None, a reduce-scatter divides the array, and each part of it is
    encoded by itself.

    Args:
      like: shape and dtype of the array.
      workers: number of workers.
    """
    _arguments.check_shaped("like", like)
    core.check_int("workers", workers, 1, 2**31 - 1)
    return None

  def canonical_state(self, state: PyTree) -> PyTree:
    """Returns the canonical state, which does not depend on the payload format.

    The error memory is one array, without the last payload. `encode` takes
    either form. Codecs that remember the same thing share this form, so that
    one can continue from the state of another.

    Args:
      state: state of one array.
    """
    self._check_state(state)
    return state

  def leaf_groups(
    self, leaves: Sequence[tuple[str, ShapedLike]]
  ) -> "list[LeafGroup]":
    """Returns the arrays that a tree is encoded as, and the codec of each.

    Args:
      leaves: path and shape of every leaf.

    Returns:
      Groups that together hold every leaf once. An ordinary codec encodes each
      leaf as it is.
    """
    _arguments.check_leaves(leaves)
    return [LeafGroup((i,), self) for i in range(len(leaves))]

  def config(self) -> dict[str, Any]:
    """Returns the codec's name and fields, nested codecs as dicts too."""
    fields = {
      f.name: _to_plain(getattr(self, f.name)) for f in dataclasses.fields(self)
    }
    return {"name": type(self).__name__, **fields}

  @classmethod
  def _from_fields(cls, fields: dict[str, Any]) -> "Codec":
    return cls(**fields)

  def _check_input(self, x: Any, key: Any, state: Any = ()) -> None:
    _arguments.check_shaped("x", x)
    core.check_instance(
      "key", key, (core.Key, type(None)), "a jaxmotion.Key or None"
    )
    if self.needs_key and key is None:
      raise ValueError(
        f"`key` must be a jaxmotion.Key for {self}, got None: "
        "make one with jaxmotion.make_key(seed)."
      )
    self._check_sharding(x)
    _check_nothing(self, state)

  def _check_sharding(self, x: Any) -> None:
    """Raises if explicit axes shard an array that this codec flattens."""
    _arguments.check_unsharded("x", x)

  def _check_state(self, state: Any) -> None:
    """Checks a state; that of a codec with its own `init` is its affair."""
    if type(self).init is Codec.init:
      _check_nothing(self, state)

  def payload_like(self, like: ShapedLike) -> PyTree:
    """Returns the payload of an array, its leaves as ShapeDtypeStructs.

    Args:
      like: shape and dtype of the array.
    """
    _arguments.check_shaped("like", like)
    return _payload_like(self, tuple(like.shape), jnp.dtype(like.dtype).name)

  def _check_payload(
    self, payload: PyTree, like: ShapedLike, *, stacked: bool = False
  ) -> None:
    """Checks a payload, or those that `sum_decoded` takes, stacked."""
    _arguments.check_shaped("like", like)
    expected = jax.tree.map(core.shape_string, self.payload_like(like))
    found = jax.tree.map(_describe_row if stacked else _describe_leaf, payload)
    if found != expected:
      name = "payloads" if stacked else "payload"
      rows = "stacked along a leading axis of workers, " if stacked else ""
      each = " each" if stacked else ""
      raise ValueError(
        f"`{name}` must be what {self} makes of {core.shape_string(like)}, "
        f"{rows}"
        f"{expected}{each}, got {found}."
      )


def _check_nothing(codec: Codec, state: Any) -> None:
  if not (isinstance(state, tuple) and state == ()):
    raise ValueError(
      f"`state` must be () for {codec}, which remembers nothing, got {state!r}."
    )


def _describe_row(leaf: Any) -> str:
  """Describes one worker's part of a leaf."""
  if not getattr(leaf, "ndim", 0):
    return _describe_leaf(leaf)
  return core.shape_string(jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype))


def _describe_leaf(leaf: Any) -> str:
  return core.shape_string(leaf) if hasattr(leaf, "dtype") else repr(leaf)


@functools.lru_cache(maxsize=4096)
def _has_state(codec: Codec) -> bool:
  sample = jax.ShapeDtypeStruct((4096,), jnp.float32)
  return bool(jax.tree.leaves(jax.eval_shape(codec.init, sample)))


@functools.lru_cache(maxsize=4096)
def _payload_like(codec: Codec, shape: tuple[int, ...], dtype: str) -> PyTree:
  def encode(x: Array) -> PyTree:
    return codec.encode(x, codec.init(x), core.make_key(0))[0]

  found = jax.eval_shape(encode, jax.ShapeDtypeStruct(shape, dtype))
  # The types of a map's mesh belong to this call; the shapes hold for all.
  return jax.tree.map(core.shape_dtype, found)


def codec_types(base: type[Codec] = Codec) -> list[type[Codec]]:
  """Returns the classes of codecs that can be made, older ones first."""
  found = []
  for kind in base.__subclasses__():
    found += [] if inspect.isabstract(kind) else [kind]
    found += codec_types(kind)
  return found


def is_own(kind: type[Codec]) -> bool:
  return kind.__module__.split(".")[0] == "jaxmotion"


def _to_plain(value: Any) -> Any:
  if isinstance(value, Codec):
    return value.config()
  if isinstance(value, tuple):
    return [_to_plain(v) for v in value]
  return value
