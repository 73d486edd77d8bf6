"""The codec `feedback`: what an encoding leaves out is added to the next."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxmotion import core, kernels
from jaxmotion.codecs import _bases, _checks, _codec, _laws, _rounds
from jaxmotion.core import Array, PyTree, ShapedLike


class Feedback(NamedTuple):
  """State of `feedback` for one array."""

  # The count stays at the greatest int32. What was sent is () in global form
  # and in the canonical state, where the value is the error itself.
  memory: kernels.ErrorMemory
  inner: PyTree = ()  # The wrapped codec's state.


@dataclasses.dataclass(frozen=True)
@core.declare(
  codec=functools.partial(_codec.check_codec, trees=True),
  decay=_checks.FRACTION,
  form=core.choice(("local", "global")),
)
class feedback(_bases.MemoryCodec, _bases.TreeCodec):
  """Adds the error of the last encoding to the next value.

  v = x + decay * e; encode(x) = inner.encode(v). Then in local form
  e <- v - inner.decode(payload), and in global form e <- v - m with m the
  decoded mean over workers.

  Properties: in local form with a contraction (1 - delta), decay 1 and bounded
  gradients, ||e||^2 <= 4 (1 - delta) G^2 / delta^2, whatever the number of
  steps. What is sent over time sums to what came in, up to e. The global form,
  that of PyTorch's PowerSGD hook, gives the same sums for linear codecs. It
  lets each worker's memory grow without bound, and is here for parity. Error
  memory is float32 whatever the gradients are. An entry that is not finite is
  forgotten rather than remembered forever.

  Args:
    codec: the codec to wrap; a tree codec gets error memory for each array.
    decay: factor on the remembered error, in (0, 1].
    form: "local" or "global".

  Example:
    >>> from jaxmotion import codecs
    >>> codec = codecs.feedback(codecs.topk(density=0.5))
    >>> x = jnp.array([1.0, 3.0])
    >>> payload, state = codec.encode(x, codec.init(x))
    >>> codec.error(state).tolist()
    [1.0, 0.0]

  References:
    Karimireddy et al., *Error Feedback Fixes SignSGD and other Gradient
    Compression Schemes*, 2019, algorithm 1 and lemma 3. Vogels, Karimireddy and
    Jaggi, *PowerSGD*, 2019 (the global form).
  """

  _part = _laws.ERROR

  decay: float = dataclasses.field(default=1.0, kw_only=True)
  form: str = dataclasses.field(default="local", kw_only=True)

  def __post_init__(self) -> None:
    if not self.codec.laws.bounds_memory:
      raise ValueError(
        "`codec` must bound the error memory (`codec.laws.bounds_memory`), got "
        f"{self.codec!r}, under which it would grow at every step. Take a "
        "codec whose error is less than its input: more bits, smaller blocks, "
        "rounding to nearest, `scaled=False`; or no feedback. A codec of your "
        "own states `laws = codecs.Laws(bounds_memory=True)`, if that holds."
      )

  @property
  def laws(self) -> _laws.Laws:
    """The laws of the wrapped codec that hold without its past."""
    return dataclasses.replace(
      self.codec.laws,
      idempotent=False,
      unbiased=False,
      projects=False,
      # A memory of an error that is remembered already counts it twice.
      contraction=0.0,
      bounds_memory=False,
    )

  @property
  def is_tree(self) -> bool:
    """Whether the wrapped codec encodes trees."""
    return self.codec.is_tree

  @property
  def needs_mean(self) -> bool:
    """True in global form, whose error is that of the workers' mean."""
    return self.form == "global" or self.codec.needs_mean

  @property
  def sends_mean(self) -> bool:
    """Whether the wrapped codec's result is the mean of what is sent."""
    return self.codec.sends_mean

  @property
  def round_kinds(self) -> tuple[str, ...]:
    """Kinds of the wrapped codec's messages."""
    return self.codec.round_kinds

  def leaf_groups(
    self, leaves: Sequence[tuple[str, ShapedLike]]
  ) -> list[_codec.LeafGroup]:
    """Returns the groups of the wrapped codec, each with error memory."""
    return [
      group._replace(codec=dataclasses.replace(self, codec=group.codec))
      for group in self.codec.leaf_groups(leaves)
    ]

  def init(self, like: ShapedLike) -> PyTree:
    """Returns zero error memory."""
    if self.is_tree:
      return _bases.TreeCodec.init(self, like)
    _checks.check_shaped("like", like)
    zeros = jnp.zeros(like.shape, jnp.float32)
    sent: PyTree = ()
    if self.form == "local":
      sent = jax.tree.map(
        lambda a: jnp.zeros(a.shape, a.dtype), self.codec.payload_like(zeros)
      )
    memory = kernels.ErrorMemory(jnp.zeros((), jnp.int32), zeros, sent)
    return Feedback(memory, self.codec.init(like))

  def init_rounds(self, like: ShapedLike, workers: int) -> PyTree:
    """Returns zero error memory, and the wrapped codec's state of rounds."""
    inner = self.codec.init_rounds(like, workers)
    return self.init(like)._replace(inner=inner)

  def error(self, state: Feedback) -> Array:
    """Returns the remembered error, float32 of the array's shape.

    Args:
      state: state of one array.
    """
    self._check_state(state)
    return self._read_part(state)

  def encode(
    self, x: PyTree, state: PyTree = (), key: core.Key | None = None
  ) -> tuple[PyTree, PyTree]:
    """Encodes x plus the remembered error.

    Raises:
      ValueError: no state was given.
    """
    if self.is_tree:
      return _bases.TreeCodec.encode(self, x, state, key)
    self._check_state(state)
    _checks.check_shaped("x", x)
    self._check_sharding(x)
    payload, v, inner = self.codec.encode_error(
      x, state.memory, state.inner, key, decay=self.decay
    )
    return payload, self._remember(state, v, payload, inner)

  def reduce_in_rounds(
    self, x: Array, state: PyTree, key: core.Key | None, workers: int
  ) -> _rounds.Rounds[_rounds.Reduced]:
    """Runs the wrapped codec's rounds on x plus the remembered error."""
    self._check_state(state)
    v = kernels.add_error(self.codec.decode, x, state.memory, self.decay)
    reduced = yield from self.codec.reduce_in_rounds(
      v, state.inner, key, workers
    )
    new = self._remember(state, v, reduced.sent, reduced.state)
    return reduced._replace(state=new)

  def _remember(
    self, state: Feedback, value: Array, sent: PyTree, inner: PyTree
  ) -> Feedback:
    """Returns the state after a value was encoded."""
    remembered = sent if self.form == "local" else ()
    count = kernels.count_encoding(state.memory.count)
    return Feedback(kernels.ErrorMemory(count, value, remembered), inner)

  def decode(self, payload: PyTree, like: ShapedLike) -> Array:
    """Decodes a payload with the wrapped codec."""
    if self.is_tree:
      return _bases.TreeCodec.decode(self, payload, like)
    _checks.check_shaped("like", like)
    y = self.codec.decode(payload, _bases.widen(like))
    return core.saturate_cast(y, like.dtype)

  @core.declare(like=_checks.check_shaped)
  def sum_decoded(self, payloads: PyTree, like: ShapedLike) -> Array:
    """Decodes and adds several workers' payloads with the wrapped codec."""
    return self.codec.sum_decoded(payloads, _bases.widen(like))

  def after_reduce(self, state: PyTree, output: Array) -> PyTree:
    """Subtracts the workers' mean from the error, in global form."""
    state = super().after_reduce(state, output)
    if self.form == "local":
      return state
    error = kernels.clear_error(state.memory.value - output.astype(jnp.float32))
    return state._replace(memory=state.memory._replace(value=error))

  def canonical_state(self, state: PyTree) -> PyTree:
    """Returns the error itself in place of the value and its payload."""
    error = self.error(state)
    memory = kernels.ErrorMemory(state.memory.count, error)
    return super().canonical_state(state._replace(memory=memory))

  def _read_part(self, state: Feedback) -> Array:
    return kernels.error_of(self.codec.decode, state.memory)

  def _write_part(self, own: Array, mean: Array) -> Feedback:
    """Returns a state whose error is `own`, in the codec's lazy form."""
    sent: PyTree = ()
    if self.form == "local":
      # A codec that may be in `feedback` loses nothing of zeros, so an encoding
      # of zeros leaves the value itself as the error.
      zeros = jnp.zeros(own.shape, jnp.float32)
      key = core.make_key(0) if self.needs_key else None
      sent, _ = self.codec.encode(zeros, self.codec.init(zeros), key)
      own = own + self.codec.decode(sent, zeros)
    # A count of 0 would say that nothing was sent yet.
    return Feedback(kernels.ErrorMemory(jnp.ones((), jnp.int32), own, sent))

  def _payload_like(self, like: ShapedLike) -> PyTree:
    if self.is_tree:
      return super()._payload_like(like)
    return self.codec.payload_like(_bases.widen(like))

  def _check_state(self, state: Any, like: ShapedLike | None = None) -> None:
    fits = isinstance(state, Feedback) and not jnp.ndim(state.memory.count)
    _checks.check_state(self, state, fits)
