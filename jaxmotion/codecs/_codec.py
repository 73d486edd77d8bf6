"""The base class of codecs."""

import abc
import dataclasses
import functools
import inspect
import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp

from jaxmotion import core, kernels
from jaxmotion.codecs import _division, _laws, _rounds
from jaxmotion.core import Array, PyTree, ShapedLike


def check_shaped(name: str, like: Any) -> None:
  """Raises unless an argument has the shape and dtype of a floating array."""
  if not (hasattr(like, "shape") and hasattr(like, "dtype")):
    raise TypeError(
      f"`{name}` must be a floating-point array or ShapeDtypeStruct, got "
      f"{like!r}."
    )
  core.check_float(name, like)


def check_unsharded(name: str, x: Any, unit: int = 0) -> None:
  """Raises if an array is sharded over explicit axes of a mesh."""
  # JAX neither flattens such arrays nor cuts them at positions that depend on
  # their elements.
  if not isinstance(x, jax.Array):
    return
  # The type of an array tells explicit axes from others.
  sharding: Any = getattr(jax.typeof(x), "sharding", None)
  spec: tuple[Any, ...] = tuple(getattr(sharding, "spec", ()))
  if spec.count(None) == len(spec):
    return
  if unit and all(axis is None for axis in spec[1:]):
    parts = math.prod(
      sharding.mesh.shape[axis] for axis in core.spec_axes(spec[0])
    )
    if x.size % (parts * unit) == 0:
      return
  raise ValueError(
    f"`{name}` must not be sharded over explicit mesh axes, got P{spec}: "
    "encode inside jax.shard_map, give `specs=` to `make_train_step`, or "
    "reshard the array to jax.P()."
  )


def check_leaves(leaves: Any) -> None:
  """Raises unless an argument is a list of paths and shapes."""
  noun = "pairs of a path and a shape"
  for leaf in core.check_sequence("leaves", leaves, noun):
    pair = core.check_sequence("leaves", leaf, noun)
    if len(pair) != 2 or not isinstance(pair[0], str):
      raise TypeError(f"`leaves` must be {noun}, got {leaf!r:.200}.")
    check_shaped(f"leaves[{pair[0]!r}]", pair[1])


def check_error_memory(x: Any, memory: Any, decay: Any) -> None:
  """Raises unless the arguments are an array, its error memory and a factor."""
  check_shaped("x", x)
  core.check_instance("memory", memory, kernels.ErrorMemory, "an ErrorMemory")
  if jnp.shape(memory.value) != x.shape or jnp.shape(memory.count) != ():
    raise ValueError(
      f"`x` must have the shape of its memory, {jnp.shape(memory.value)}, got "
      f"{core.shape_string(x)} and a count {jnp.shape(memory.count)}."
    )
  core.check_number("decay", decay, 0, 1, open_low=True)


def check_nothing(codec: Any, state: Any) -> None:
  """Raises unless a state is that of a codec that remembers nothing."""
  if not (isinstance(state, tuple) and state == ()):
    raise ValueError(
      f"`state` must be () for {codec}, which remembers nothing, got {state!r}."
    )


def check_unread(codec: Any, state: Any) -> None:
  """Raises if a state has parts of a worker's own, which no method reads."""
  if jax.tree.leaves(core.drop_shared(state)):
    raise ValueError(
      "`codec` must say what it remembers of an array, got one that does not: "
      f"{codec!r}. Give it `memory_parts`, `read_memory` and `write_memory`."
    )


def check_payload(
  codec: Any,
  payload: PyTree,
  wanted: PyTree,
  like: ShapedLike,
  *,
  stacked: bool,
) -> None:
  """Raises unless payloads have the expected shapes, stacked or not."""
  if _fits(payload, wanted, stacked):
    return
  expected: Any = jax.tree.map(core.shape_string, wanted)
  found = jax.tree.map(_describe_row if stacked else _describe_leaf, payload)
  if found != expected:
    name = "payloads" if stacked else "payload"
    rows = "stacked along a leading axis of workers, " if stacked else ""
    each = " each" if stacked else ""
    raise ValueError(
      f"`{name}` must be what {codec} makes of {core.shape_string(like)}, "
      f"{rows}{expected}{each}, got {found}."
    )


def _fits(payload: PyTree, like: PyTree, stacked: bool) -> bool:
  """Says whether a payload, or each of those stacked, has these shapes."""
  treedef: Any
  leaves, treedef = jax.tree.flatten(payload)
  wanted, expected = jax.tree.flatten(like)
  if treedef != expected:
    return False
  for a, b in zip(leaves, wanted, strict=True):
    if not isinstance(a, jax.Array | jax.ShapeDtypeStruct):
      return False
    shape = a.shape[1:] if stacked and a.ndim else a.shape
    if shape != b.shape or a.dtype != b.dtype:
      return False
  return True


def _describe_row(leaf: Any) -> str:
  """Describes one worker's part of a leaf."""
  if not getattr(leaf, "ndim", 0):
    return _describe_leaf(leaf)
  return core.shape_string(jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype))


def _describe_leaf(leaf: Any) -> str:
  return core.shape_string(leaf) if hasattr(leaf, "dtype") else repr(leaf)


@functools.lru_cache(maxsize=4096)
def has_state(codec: Any) -> bool:
  """Returns whether the state of a codec of arrays holds any array."""
  sample = jax.ShapeDtypeStruct((4096,), jnp.float32)
  return bool(jax.tree.leaves(jax.eval_shape(codec.init, sample)))


@functools.lru_cache(maxsize=4096)
def payload_like(codec: Any, shape: tuple[int, ...], dtype: str) -> PyTree:
  """Returns the payload of an array, its leaves as ShapeDtypeStructs."""

  def encode(x: Array) -> PyTree:
    return codec.encode(x, codec.init(x), core.make_key(0))[0]

  found = jax.eval_shape(encode, jax.ShapeDtypeStruct(shape, dtype))
  # The types of a map's mesh belong to this call; the shapes hold for all.
  return jax.tree.map(core.shape_dtype, found)


def codec_types(base: type[Any]) -> list[type[Any]]:
  """Returns the classes of codecs that can be made, older ones first."""
  found: list[type[Any]] = []
  for kind in base.__subclasses__():
    found += [] if inspect.isabstract(kind) else [kind]
    found += codec_types(kind)
  return found


def is_own(kind: type) -> bool:
  """Returns whether a class of codecs belongs to this package."""
  return kind.__module__.split(".")[0] == "jaxmotion"


def to_plain(value: Any) -> Any:
  """Returns a field of a codec as plain data."""
  if hasattr(value, "config"):
    return value.config()
  if isinstance(value, tuple):
    return [to_plain(v) for v in value]
  return value


@dataclasses.dataclass(frozen=True)
class MemoryPart:
  """Part of what a codec remembers of one array, and what it stands for.

  A part is float32 of the array's shape, in units of the mean: what counts is
  its mean over workers. When the number of workers changes, weights that keep
  this mean mix the parts of the old workers.

  Attributes:
    name: key of the part in what `Codec.read_memory` returns. A codec goes on
      from the parts of another codec that have the same names.
    is_pending: whether the part is still to be sent, such as error memory.
      `checkpoint.resize` forgets it with `reset_memory`, and `metrics` reports
      its norm.
    keeps_mean: whether the mean stays when the result is a sum over workers.
      All other parts enter the result: their sum over workers stays then.
    row_of: name of the part that this one adds to, or None. Such a part is one
      row of an array that workers keep together: float32[row], and the rows of
      all workers, one after another, begin with the elements of the array.
      `write_memory` is not given it: it is added to the part of that name.
    noun: what the part is, in messages; "" for the name.
    kept_by: name of a codec that keeps the part around another codec, for
      messages; "" for none.

  Example:
    >>> from jaxmotion import codecs
    >>> codec = codecs.feedback(codecs.topk(density=0.1))
    >>> codec = codecs.momentum_correction(codec)
    >>> [part.name for part in codec.memory_parts]
    ['momentum', 'error']
  """

  name: str
  _: dataclasses.KW_ONLY
  is_pending: bool = False
  keeps_mean: bool = False
  row_of: str | None = None
  noun: str = ""
  kept_by: str = ""

  def __post_init__(self) -> None:
    core.check_text("name", self.name)
    core.check_bool("is_pending", self.is_pending)
    core.check_bool("keeps_mean", self.keeps_mean)
    core.check_instance(
      "row_of", self.row_of, (str, type(None)), "the name of a part or None"
    )
    core.check_text("noun", self.noun)
    core.check_text("kept_by", self.kept_by)


ERROR = MemoryPart(
  "error", is_pending=True, noun="error memory", kept_by="feedback"
)
MOMENTUM = MemoryPart(
  "momentum", noun="a momentum", kept_by="momentum_correction"
)
# The mean of what workers have sent is what all of them know, whatever is made
# of the result.
SENT = MemoryPart(
  "sent", keeps_mean=True, noun="a memory of what was sent", kept_by="ef21"
)


def nest_parts(
  part: MemoryPart, inner: Sequence[MemoryPart]
) -> tuple[MemoryPart, ...]:
  """Returns a part and those of the codec inside; raises if names collide."""
  if part.name in [other.name for other in inner]:
    raise ValueError(
      f"`codec` must remember no {part.name!r} inside of a codec that does: "
      f"one name cannot stand for two parts, got {[p.name for p in inner]}."
    )
  return (part, *inner)


def check_parts(
  codec: Any, parts: Any, means: Any, like: ShapedLike, workers: int
) -> None:
  """Raises unless arguments are what `codec.write_memory` takes."""
  check_shaped("like", like)
  core.check_int("workers", workers, 1, 2**31 - 1)
  for name, values in (("parts", parts), ("means", means)):
    found = core.check_mapping(name, values, "names to parts of a memory")
    for part in codec.memory_parts:
      if part.row_of is not None:
        continue
      if part.name not in found:
        raise ValueError(
          f"`{name}` must have the part {part.name!r}, got {sorted(found)}."
        )
      x = found[part.name]
      core.check_float(f"{name}[{part.name!r}]", x)
      if jnp.shape(x) != tuple(like.shape):
        raise ValueError(
          f"`{name}[{part.name!r}]` must have the shape of `like`, "
          f"{tuple(like.shape)}, got {core.shape_string(x)}."
        )


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
    """Refuses a class of your own that has the name of a codec of this
    package."""
    super().__init_subclass__(**kwargs)
    kinds = filter(is_own, codec_types(Codec))
    own = {kind.__name__ for kind in kinds}
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
  def memory_parts(self) -> tuple[MemoryPart, ...]:
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
    return has_state(self)

  def init(self, like: ShapedLike) -> PyTree:
    """Returns the state for an array of this shape and dtype.

    Args:
      like: array or ShapeDtypeStruct.

    Returns:
      A pytree of arrays; `()` for a codec that remembers nothing.
    """
    check_shaped("like", like)
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
    check_error_memory(x, memory, decay)
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
    check_shaped("like", like)
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
    check_shaped("like", like)
    if type(self).init is Codec.init:
      check_nothing(self, state)
    check_unread(self, state)
    return {}

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
    check_parts(self, parts, means, like, workers)
    state = self.init_rounds(like, workers)
    check_unread(self, state)
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
    check_leaves(leaves)
    return [LeafGroup((i,), self) for i in range(len(leaves))]

  def _check_paths(self, paths: Sequence[str]) -> None:
    """Raises for a rule of the codec that matches none of a tree's paths."""
    del paths  # An ordinary codec has no rules.

  def config(self) -> dict[str, Any]:
    """Returns the codec's name and fields, nested codecs as dicts too."""
    fields = {
      f.name: to_plain(getattr(self, f.name)) for f in dataclasses.fields(self)
    }
    return {"name": type(self).__name__, **fields}

  @classmethod
  def _from_fields(cls, fields: dict[str, Any]) -> "Codec":
    return cls(**fields)

  def _check_input(self, x: Any, key: Any, state: Any = ()) -> None:
    check_shaped("x", x)
    core.check_instance(
      "key", key, (core.Key, type(None)), "a jaxmotion.Key or None"
    )
    if self.needs_key and key is None:
      raise ValueError(
        f"`key` must be a jaxmotion.Key for {self}, got None: "
        "make one with jaxmotion.make_key(seed)."
      )
    self._check_sharding(x)
    check_nothing(self, state)

  def _check_sharding(self, x: Any) -> None:
    """Raises if explicit axes shard an array that this codec flattens."""
    check_unsharded("x", x)

  def _check_state(self, state: Any) -> None:
    """Checks a state; that of a codec with its own `init` is its affair."""
    if type(self).init is Codec.init:
      check_nothing(self, state)

  def payload_like(self, like: ShapedLike) -> PyTree:
    """Returns the payload of an array, its leaves as ShapeDtypeStructs.

    Args:
      like: shape and dtype of the array.
    """
    check_shaped("like", like)
    return payload_like(self, tuple(like.shape), jnp.dtype(like.dtype).name)

  def _check_payload(
    self, payload: PyTree, like: ShapedLike, *, stacked: bool = False
  ) -> None:
    """Checks a payload, or those that `sum_decoded` takes, stacked."""
    check_shaped("like", like)
    check_payload(self, payload, self.payload_like(like), like, stacked=stacked)


def check_codec(
  name: str,
  codec: Any,
  *,
  trees: bool = False,
  stateless: bool = False,
  one_round: bool = False,
) -> None:
  """Raises unless an argument is a codec of the kind that the caller takes.

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
