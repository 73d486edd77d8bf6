"""Error memory: what was not sent is added to what is sent next."""

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxmotion.codecs._base import Codec, Part
from jaxmotion.codecs._partition import TreeCodec
from jaxmotion.core import (
  Array,
  Key,
  Like,
  PyTree,
  check_choice,
  check_fraction,
)


class Feedback(NamedTuple):
  """Error memory of one array.

  Attributes:
    error: float32, of the array's shape.
    inner: the wrapped codec's state.
  """

  error: Array
  inner: PyTree = ()


@dataclasses.dataclass(frozen=True)
class feedback(TreeCodec):
  """Adds the error of the last encoding to the next value.

  v = x + decay * e; encode(x) = inner.encode(v); then in local form
  e <- v - inner.decode(payload), and in global form e <- v - m with m the
  decoded mean over workers.

  Laws: in local form with a contraction (1 - delta), decay 1 and bounded
  gradients, ||e||^2 <= 4 (1 - delta) G^2 / delta^2, whatever the number of
  steps; what is sent over time sums to what came in, up to e. The global
  form, that of PyTorch's PowerSGD hook, gives the same sums for linear codecs
  but lets each worker's memory grow without bound: it is here for parity.
  Error memory is float32 whatever the gradients are. An entry that is not
  finite is forgotten rather than remembered for ever.

  Args:
    codec: the codec to wrap; a tree codec gets error memory for each array.
    decay: factor on the remembered error, in (0, 1].
    form: "local" or "global".

  Example:
    >>> from jaxmotion import codecs
    >>> codec = codecs.feedback(codecs.topk(density=0.5))
    >>> x = jnp.array([1.0, 3.0])
    >>> payload, state = codec.encode(x, codec.init(x))
    >>> state.error.tolist()
    [1.0, 0.0]

  References:
    Karimireddy et al., *Error Feedback Fixes SignSGD and other Gradient
    Compression Schemes*, 2019, algorithm 1 and lemma 3; Vogels, Karimireddy
    and Jaggi, *PowerSGD*, 2019 (the global form).
  """

  codec: Codec
  decay: float = dataclasses.field(default=1.0, kw_only=True)
  form: str = dataclasses.field(default="local", kw_only=True)

  def __post_init__(self) -> None:
    if not isinstance(self.codec, Codec):
      raise TypeError(f"`codec` must be a codec, got {self.codec!r}.")
    check_fraction("decay", self.decay)
    check_choice("form", self.form, ("local", "global"))

  @property
  def is_tree(self) -> bool:
    """Whether the wrapped codec encodes trees."""
    return self.codec.is_tree

  @property
  def needs_key(self) -> bool:
    """Whether the wrapped codec needs one."""
    return self.codec.needs_key

  def parts(self, leaves: Sequence[tuple[str, Like]]) -> list[Part]:
    """Wraps the codec of every array."""
    return [
      Part(part.leaves, dataclasses.replace(self, codec=part.codec))
      for part in self.codec.parts(leaves)
    ]

  def init(self, like: Like) -> PyTree:
    """Returns zero error memory."""
    if self.is_tree:
      return super().init(like)
    error = jnp.zeros(like.shape, jnp.float32)
    return Feedback(error, self.codec.init(like))

  def encode(
    self, x: PyTree, state: PyTree = (), key: Key | None = None
  ) -> tuple[PyTree, PyTree]:
    """Encodes x plus the remembered error.

    Raises:
      ValueError: no state was given.
    """
    if self.is_tree:
      return super().encode(x, state, key)
    if not isinstance(state, Feedback):
      raise ValueError(
        f"`state` must be what `init` returned for {self!r}, got {state!r}."
      )
    v = x.astype(jnp.float32) + state.error * self.decay
    payload, inner = self.codec.encode(v, state.inner, key)
    # The error is that of the words that travel: without the barrier XLA may
    # round a second time, with other instructions, in the fusion that makes e.
    payload = lax.optimization_barrier(payload)
    error = v
    if self.form == "local":
      error = _forget(v - self.codec.decode(payload, v))
    return payload, Feedback(error, inner)

  def decode(self, payload: PyTree, like: Like) -> Array:
    """Decodes with the wrapped codec."""
    if self.is_tree:
      return super().decode(payload, like)
    wide = jax.ShapeDtypeStruct(like.shape, jnp.float32)
    return self.codec.decode(payload, wide).astype(like.dtype)

  def settle(self, state: PyTree, output: Array) -> PyTree:
    """In global form, subtracts the workers' mean."""
    state = state._replace(inner=self.codec.settle(state.inner, output))
    if self.form == "local":
      return state
    error = _forget(state.error - output.astype(jnp.float32))
    return state._replace(error=error)


def _forget(error: Array) -> Array:
  return jnp.where(jnp.isfinite(error), error, 0.0)
