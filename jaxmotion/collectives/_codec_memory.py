"""Reads and makes what codecs remember of one array, as named parts.

* "error": what is still to be sent, of `feedback` and `onebit`;
* "momentum": each worker's own momentum, of `momentum_correction`;
* "sent": all that a worker has sent, of `ef21`.

A part has the array's shape. Weights that keep the mean over workers may mix
it: the mean of errors is still sent, and the mean of momenta enters the next
means. The mean of what was sent is what all workers know.
"""

import math
from collections.abc import Mapping

import jax
import jax.numpy as jnp

from jaxmotion import codecs, core, kernels
from jaxmotion.core import Array, PyTree

PARTS = {
  "error": "error memory",
  "momentum": "a momentum",
  "sent": "a memory of what was sent",
}


def list_parts(codec: codecs.Codec) -> tuple[str, ...]:
  """Returns the names of what a codec of arrays remembers.

  Args:
    codec: codec of one array.

  Raises:
    ValueError: its state has something else.

  Example:
    >>> from jaxmotion import codecs
    >>> memory = codecs.feedback(codecs.topk(density=0.1))
    >>> list_parts(codecs.momentum_correction(memory))
    ('momentum', 'error')
  """
  if isinstance(codec, codecs.momentum_correction):
    return ("momentum", *list_parts(codec.codec))
  if isinstance(codec, codecs.onebit):
    return ("error",)
  if isinstance(codec, codecs.feedback | codecs.ef21) and not _has_own_state(
    codec.codec
  ):
    return ("error",) if isinstance(codec, codecs.feedback) else ("sent",)
  if not _has_own_state(codec):
    return ()
  raise ValueError(
    "`codec` must keep no state but the error memory of `feedback`, got "
    f"{codec!r}: resize knows `feedback`, `momentum_correction`, `ef21` and "
    "`onebit`."
  )


def _has_own_state(codec: codecs.Codec) -> bool:
  """Returns whether a codec remembers what is a worker's own."""
  if not codec.has_state:
    return False
  sample = jax.ShapeDtypeStruct((4096,), jnp.float32)
  state = jax.eval_shape(codec.init, sample)
  return bool(jax.tree.leaves(core.drop_shared(state)))


def read_parts(codec: codecs.Codec, state: PyTree) -> dict[str, Array]:
  """Returns what one worker remembers of one array, but for `onebit`."""
  if isinstance(codec, codecs.momentum_correction):
    return {"momentum": state.momentum, **read_parts(codec.codec, state.inner)}
  if isinstance(codec, codecs.ef21):
    return {"sent": state.own}
  return (
    {"error": codec.error(state)} if isinstance(codec, codecs.feedback) else {}
  )


def make_states(
  codec: codecs.Codec,
  parts: Mapping[str, Array],
  rows: int,
  *,
  canonical: bool = False,
) -> PyTree:
  """Returns states of a codec that remember these parts, but for `onebit`."""
  if isinstance(codec, codecs.feedback):
    return make_memories(codec, parts["error"], rows, canonical=canonical)
  if isinstance(codec, codecs.momentum_correction):
    momentum = parts["momentum"]
    lead, shape = momentum.shape[:rows], momentum.shape[rows:]
    inner = make_states(codec.codec, parts, rows, canonical=canonical)
    fresh = codec.init(jax.ShapeDtypeStruct(shape, jnp.float32))
    if not list_parts(codec.codec):
      inner = _repeat(core.drop_shared(fresh.inner), lead)
    return fresh._replace(momentum=momentum, inner=inner)
  if isinstance(codec, codecs.ef21):
    sent = parts["sent"]
    like = jax.ShapeDtypeStruct(sent.shape[rows:], jnp.float32)
    fresh = core.drop_shared(codec.init(like))
    inner = _repeat(fresh.inner, sent.shape[:rows])
    return fresh._replace(own=sent, inner=inner)
  return ()


def _repeat(state: PyTree, lead: tuple[int, ...]) -> PyTree:
  return jax.tree.map(lambda a: jnp.broadcast_to(a, (*lead, *a.shape)), state)


def memory_codec(codec: codecs.Codec) -> codecs.feedback:
  """Returns a codec whose own state is error memory and nothing else.

  Args:
    codec: codec with a state.

  Raises:
    ValueError: its state is another one.
  """
  if isinstance(codec, codecs.feedback) and not _has_own_state(codec.codec):
    return codec
  raise ValueError(
    "`codec` must keep no state but the error memory of `feedback`, got "
    f"{codec!r}."
  )


def make_memories(
  codec: codecs.feedback, errors: Array, rows: int, *, canonical: bool = False
) -> PyTree:
  """Returns states of a codec that has these errors still to send.

  Args:
    codec: remembers them.
    errors: float32, with leading axes such as one of workers.
    rows: number of leading axes.
    canonical: whether codecs of several levels share the state.
  """
  lead, like = errors.shape[:rows], jnp.zeros(errors.shape[rows:], jnp.float32)
  fresh, sent = core.drop_shared(codec.init(like)), ()
  if jax.tree.leaves(fresh.memory.sent) and not canonical:
    # A codec that may be in `feedback` loses nothing of zeros, so an encoding
    # of zeros leaves the value itself as the error.
    key = core.make_key(0) if codec.needs_key else None
    zeros, _ = codec.codec.encode(like, codec.codec.init(like), key)
    errors = errors + codec.codec.decode(zeros, like)[(None,) * rows]
    sent = jax.tree.map(lambda a: jnp.broadcast_to(a, (*lead, *a.shape)), zeros)
  # A count of 0 would say that nothing was sent yet.
  count = jnp.ones(lead, fresh.memory.count.dtype)
  return fresh._replace(memory=kernels.ErrorMemory(count, errors, sent))


def read_onebit(state: PyTree, shape: tuple[int, ...]) -> tuple[Array, Array]:
  """Returns each worker's errors of `onebit`, and those of the mean."""
  size = math.prod(shape)
  own = state.own[:, :size].reshape(-1, *shape)
  return own, state.of_mean.reshape(-1)[:size].reshape(shape)


def make_onebit(codec: codecs.onebit, errors: Array, mean: Array) -> PyTree:
  """Returns states of `onebit` on all workers; its padding has no error."""
  # `errors`: float32[workers, ...], those of the workers.
  # `mean`: float32[...], those of the mean.
  workers = errors.shape[0]
  like = jax.ShapeDtypeStruct(mean.shape, jnp.float32)
  fresh = codec.init_rounds(like, workers)
  padding = fresh.own.size - mean.size
  own = jnp.pad(errors.reshape(workers, -1), ((0, 0), (0, padding)))
  rows = jnp.pad(mean.reshape(-1), (0, padding)).reshape(workers, -1)
  return fresh._replace(own=own, of_mean=rows)
