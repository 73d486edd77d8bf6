"""The base class of codecs."""

import abc
import dataclasses
import functools
import inspect
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp

from jaxmotion import core, kernels
from jaxmotion.codecs import _checks, _division, _laws, _rounds
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
  the shape and dtype of `x`. If its state is each worker's own, `memory_parts`,
  `read_memory` and `write_memory` say what it stands for. The state then goes
  on with other workers and other codecs (`checkpoint.resize`).

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
    """Refuses a class of your own with the name of a codec of this package."""
    super().__init_subclass__(**kwargs)
    own = {kind.__name__ for kind in _codec_types(Codec) if _is_own(kind)}
    if cls.__name__ in own and not _is_own(cls):
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
    An exchange hands them float32, and adds up decoded payloads before it
    rounds to a narrower dtype.
    """
    return False

  @property
  def round_kinds(self) -> tuple[str, ...]:
    """Kinds of the messages that `reduce_in_rounds` sends; () for none.

    Most codecs have none: the collective encodes, sends and decodes.
    """
    return ()

  @property
  def memory_parts(self) -> tuple[_laws.MemoryPart, ...]:
    """The parts of what it remembers of one array; () for nothing.

    State that is `jaxmotion.Shared` is no part.
    """
    return ()

  @property
  def needs_mean(self) -> bool:
    """Whether `after_reduce` needs the mean of the array that was encoded."""
    return False

  @property
  def sends_mean(self) -> bool:
    """Whether the mean over workers of `decode(sent)` is the result.

    It is asked of codecs that have `round_kinds`.
    """
    return self.laws.bounds_memory

  @property
  def is_tree(self) -> bool:
    """Whether the codec encodes trees rather than arrays."""
    return False

  @property
  def has_state(self) -> bool:
    """Whether it remembers anything between calls, such as error memory."""
    return _has_state(self)

  @core.declare(like=_checks.check_shaped)
  def init(self, like: ShapedLike) -> PyTree:
    """Returns the state for an array of this shape and dtype.

    Args:
      like: array or ShapeDtypeStruct.

    Returns:
      A pytree of arrays; `()` for a codec that remembers nothing.
    """
    return ()

  @core.declare(workers=_checks.WORKERS)
  def init_rounds(self, like: ShapedLike, workers: int) -> PyTree:
    """Returns the state of a codec that has `round_kinds`.

    Args:
      like: array or ShapeDtypeStruct.
      workers: number of workers, on which its shapes may depend.
    """
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

  @core.declare(
    x=_checks.check_shaped,
    memory=core.instance(kernels.ErrorMemory, "an ErrorMemory"),
    decay=_checks.FRACTION,
  )
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
    value, count = jnp.shape(memory.value), jnp.shape(memory.count)
    if value != x.shape or count != ():
      raise ValueError(
        f"`x` must have the shape of its memory, {value}, got "
        f"{core.shape_string(x)} and a count {count}."
      )
    return self._encode_error(x, memory, state, key, decay)

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

  @core.declare(output=core.float_array)
  def after_reduce(self, state: PyTree, output: Array) -> PyTree:
    """Updates the state after the collective, from the mean over workers.

    Global error feedback needs that mean; other codecs keep their state.

    Args:
      state: what `encode` returned.
      output: the decoded mean over workers, of the shape of `x`.
    """
    self._check_state(state)
    return state

  @core.declare(like=_checks.check_shaped, workers=_checks.WORKERS)
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
    return self._divide(like, workers)

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

  @core.declare(like=_checks.check_shaped)
  def read_memory(self, state: PyTree, like: ShapedLike) -> dict[str, Array]:
    """Returns what one worker remembers of one array, as named parts.

    Args:
      state: state of one worker, whose `Shared` parts may be left empty.
      like: shape and dtype of the array.

    Returns:
      For each of `memory_parts`, by its name, float32 of the array's shape, in
      units of the mean. A part with `row_of` is float32[row] instead.

    Raises:
      ValueError: the state is another codec's, or one that the codec does not
        say how to read.

    Example:
      >>> from jaxmotion import codecs
      >>> codec, x = codecs.feedback(codecs.topk(density=0.5)), jnp.arange(2.0)
      >>> _, state = codec.encode(x + 1, codec.init(x))
      >>> codec.read_memory(state, x)["error"].tolist()
      [1.0, 0.0]
    """
    if type(self).init is Codec.init:
      _checks.check_nothing(self, state)
    _checks.check_unread(self, state)
    return {}

  @_checks.declare_parts
  def write_memory(
    self,
    parts: Mapping[str, Array],
    means: Mapping[str, Array],
    like: ShapedLike,
    workers: int,
  ) -> PyTree:
    """Returns the state of one worker that remembers these parts.

    It runs under `jax.vmap`, once for each worker. What it makes of `means`,
    `like` and `workers` alone is equal on all workers and may be `Shared`.

    Args:
      parts: for each of `memory_parts` without `row_of`, by its name, float32
        of the array's shape, this worker's own; others are ignored.
      means: the means over workers of these parts, of the same shapes.
      like: shape and dtype of the array.
      workers: number of workers.

    Returns:
      A state like that of `init_rounds`.

    Raises:
      TypeError: a part is no array.
      ValueError: one is missing or of another shape, or the codec does not say
        how to write its state.

    Example:
      >>> from jaxmotion import codecs
      >>> codec, x = codecs.feedback(codecs.sign()), jnp.zeros(2)
      >>> error = {"error": jnp.array([0.5, -2.0])}
      >>> state = codec.write_memory(error, error, x, workers=4)
      >>> codec.read_memory(state, x)["error"].tolist()
      [0.5, -2.0]
    """
    _checks.check_parts(self, parts, means, like)
    state = self.init_rounds(like, workers)
    _checks.check_unread(self, state)
    return state

  @core.declare(leaves=_checks.check_leaves)
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
    return [LeafGroup((i,), self) for i in range(len(leaves))]

  @core.declare(like=_checks.check_shaped)
  def payload_like(self, like: ShapedLike) -> PyTree:
    """Returns the payload of an array, its leaves as ShapeDtypeStructs.

    Args:
      like: shape and dtype of the array.
    """
    return self._payload_like(like)

  def config(self) -> dict[str, Any]:
    """Returns the codec's name and fields, nested codecs as dicts too."""
    fields = {
      f.name: _to_plain(getattr(self, f.name)) for f in dataclasses.fields(self)
    }
    return {"name": type(self).__name__, **fields}

  @staticmethod
  @core.declare(
    config=core.instance(dict, "a dict that `Codec.config` returned")
  )
  def from_config(config: dict[str, Any]) -> "Codec":
    """Constructs the codec that `config` describes.

    Args:
      config: what `Codec.config` returned, also after a round trip through
        JSON.

    Returns:
      An equal codec.

    Raises:
      TypeError: `config` is no dict.
      ValueError: the name is no codec's or that of two classes of your own, or
        a field is none of its fields.

    Example:
      >>> from jaxmotion import codecs
      >>> codec = codecs.feedback(codecs.uniform(bits=4))
      >>> codecs.Codec.from_config(codec.config()) == codec
      True
    """
    fields = dict(config)
    name = fields.pop("name", None)
    kind = _find_type(name)
    known = [f.name for f in dataclasses.fields(kind)]
    for field in fields:
      if field not in known:
        raise ValueError(
          f"`config` of codec {name!r} must have fields of {known}, "
          f"got {field!r}."
        )
    return kind._from_fields({k: _from_plain(v) for k, v in fields.items()})

  # What subclasses of this package define in place of public methods, which
  # check their arguments first.

  @classmethod
  def _from_fields(cls, fields: dict[str, Any]) -> "Codec":
    return cls(**fields)

  def _payload_like(self, like: ShapedLike) -> PyTree:
    return _trace_payload(self, tuple(like.shape), jnp.dtype(like.dtype).name)

  def _encode_error(
    self,
    x: Array,
    memory: kernels.ErrorMemory,
    state: PyTree,
    key: core.Key | None,
    decay: float,
  ) -> tuple[PyTree, Array, PyTree]:
    """Adds the error to x in memory, then encodes the sum."""
    value = kernels.add_error(self.decode, x, memory, decay)
    payload, state = self.encode(value, state, key)
    return payload, value, state

  def _count_dropped(self, payload: PyTree, like: ShapedLike) -> Array:
    return jnp.uint32(0)

  def _divide(
    self, like: ShapedLike, workers: int
  ) -> _division.Division | None:
    return None

  def _check_paths(self, paths: Sequence[str]) -> None:
    """Raises for a rule of the codec that matches none of a tree's paths."""
    del paths  # An ordinary codec has no rules.

  def _check_sharding(self, x: Any) -> None:
    """Raises if explicit axes shard an array that this codec flattens."""
    _checks.check_unsharded(x)

  def _check_state(self, state: Any, like: ShapedLike | None = None) -> None:
    """Raises unless a state is (); codecs with an `init` check their own."""
    if type(self).init is Codec.init:
      _checks.check_nothing(self, state)

  def _check_input(self, x: Any, key: Any, state: Any = ()) -> None:
    """Checks what `encode` is given; `state` is that of a codec without any."""
    _checks.check_shaped("x", x)
    core.optional_key("key", key)
    if self.needs_key and key is None:
      raise ValueError(
        f"`key` must be a jaxmotion.Key for {self}, got None: "
        "make one with jaxmotion.make_key(seed)."
      )
    self._check_sharding(x)
    _checks.check_nothing(self, state)

  def _check_payload(
    self, payload: PyTree, like: ShapedLike, *, stacked: bool = False
  ) -> None:
    """Checks a payload, or those that `sum_decoded` takes, stacked."""
    _checks.check_payload(self, payload, like, stacked=stacked)


def check_codec(
  name: str,
  codec: Any,
  *,
  trees: bool = False,
  stateless: bool = False,
  one_round: bool = False,
) -> Any:
  """Returns a codec of the kind that the caller takes, or raises.

  Args:
    name: the argument's name, for the message.
    codec: what the caller gave.
    trees: whether codecs of whole trees are allowed as well.
    stateless: whether codecs with state, such as error memory, are refused.
    one_round: whether codecs that reduce in rounds of their own are refused.

  Raises:
    TypeError: not a codec, or a codec of trees where `trees` is False.
    ValueError: a codec with state where `stateless` is True, or with rounds
      where `one_round` is True.

  >>> check_codec("codec", 8)
  Traceback (most recent call last):
  ...
  TypeError: `codec` must be a codec of arrays, got 8.
  """
  if not isinstance(codec, Codec) or (codec.is_tree and not trees):
    kind = "a codec" if trees else "a codec of arrays"
    raise TypeError(f"`{name}` must be {kind}, got {codec!r}.")
  if stateless and codec.has_state:
    raise ValueError(f"`{name}` must be a codec without state, got {codec!r}.")
  if one_round and codec.round_kinds:
    raise ValueError(
      f"`{name}` must be a codec that encodes without other workers, got "
      f"{codec!r}: give it to `all_reduce` or `exchange`."
    )
  return codec


@functools.lru_cache(maxsize=4096)
def _has_state(codec: Codec) -> bool:
  """Returns whether the state of a codec of arrays holds any array."""
  sample = jax.ShapeDtypeStruct((4096,), jnp.float32)
  return bool(jax.tree.leaves(jax.eval_shape(codec.init, sample)))


@functools.lru_cache(maxsize=4096)
def _trace_payload(codec: Codec, shape: tuple[int, ...], dtype: str) -> PyTree:
  """Returns the payload of an array, its leaves as ShapeDtypeStructs."""

  def encode(x: Array) -> PyTree:
    return codec.encode(x, codec.init(x), core.make_key(0))[0]

  payload = jax.eval_shape(encode, jax.ShapeDtypeStruct(shape, dtype))
  # The types of a map's mesh belong to this call; the shapes hold for all.
  return jax.tree.map(core.shape_dtype, payload)


def _codec_types(base: type[Any]) -> list[type[Any]]:
  """Returns the classes of codecs that can be made, older ones first."""
  kinds: list[type[Any]] = []
  for kind in base.__subclasses__():
    kinds += [] if inspect.isabstract(kind) else [kind]
    kinds += _codec_types(kind)
  return kinds


def _is_own(kind: type) -> bool:
  """Returns whether a class of codecs belongs to this package."""
  return kind.__module__.split(".")[0] == "jaxmotion"


def _find_type(name: Any) -> type[Codec]:
  """Finds the class of codecs that a configuration names, or raises."""
  kinds = _codec_types(Codec)
  matching = [kind for kind in kinds if kind.__name__ == name]
  if not matching:
    names = ", ".join(sorted({kind.__name__ for kind in kinds}))
    raise ValueError(
      f"`name` of a codec in `config` must be one of {names}, got {name!r}."
    )
  # A class that was refused for its name lives on in its traceback.
  matching = [kind for kind in matching if _is_own(kind)] or matching
  places = {f"{kind.__module__}.{kind.__qualname__}" for kind in matching}
  if len(places) > 1:
    raise ValueError(
      f"`name` of a codec must be that of one class, got {name!r}, which "
      f"{' and '.join(sorted(places))} have: rename one of them."
    )
  # A class that a notebook defines again replaces the one before.
  return matching[-1]


def _to_plain(value: Any) -> Any:
  """Returns a field of a codec as plain data."""
  if hasattr(value, "config"):
    return value.config()
  return [*map(_to_plain, value)] if isinstance(value, tuple) else value


def _from_plain(value: Any) -> Any:
  """Returns the field of a codec that plain data describe."""
  if isinstance(value, dict):
    return Codec.from_config(value)
  is_list = isinstance(value, list | tuple)
  return tuple(map(_from_plain, value)) if is_list else value
