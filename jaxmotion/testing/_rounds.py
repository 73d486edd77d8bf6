"""Check of codecs that reduce in rounds, with workers but without devices."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxmotion import codecs, core
from jaxmotion.core import Array, PyTree
from jaxmotion.testing import _arguments

_TOLERANCE = 1e-5


def check_rounds(codec: codecs.Codec, xs: Array, *, steps: int = 2) -> None:
  """Checks the laws of a codec that reduces in rounds of its own.

  * All workers send messages of one shape, of the kinds that `round_kinds`
    states.
  * All get the same mean and the same `Shared` state, bit for bit.
  * The mean of what they sent, decoded, is that mean, within 1e-5 of the
    greatest element, so that `feedback` remembers what is missing. Codecs that
    do not state `sends_mean` need not keep this law.
  * State keeps its structure, shapes and dtypes.

  Args:
    codec: a codec with `round_kinds`.
    xs: finite floating-point array with a leading axis of workers.
    steps: number of reductions, one after another.

  Raises:
    AssertionError: a law does not hold; the message says which.

  Example:
    >>> from jaxmotion import codecs
    >>> xs = jnp.arange(24.0).reshape(2, 4, 3)
    >>> check_rounds(codecs.feedback(codecs.low_rank(rank=1)), xs)
  """
  _arguments.check_codec_and_array(codec, "xs", xs)
  core.check_int("steps", steps, 1, 1000)
  if not codec.round_kinds:
    raise ValueError(f"`codec` must have `round_kinds`, got {codec!r}.")
  if jnp.ndim(xs) < 1 or not len(xs):
    raise ValueError(
      f"`xs` must have a leading axis of workers, got shape {jnp.shape(xs)}."
    )

  @jax.jit
  def reduce(states: list[PyTree], step: Array) -> tuple[Any, ...]:
    done = _answer_rounds(
      codec,
      [
        codec.reduce_in_rounds(
          x, state, core.make_key(7, r).fold(step), len(xs)
        )
        for r, (x, state) in enumerate(zip(xs, states, strict=True))
      ],
    )
    sent = jnp.stack([codec.decode(r.sent, xs[0]) for r in done])
    new = [codec.after_reduce(r.state, r.mean) for r in done]
    return [r.mean for r in done], sent.mean(0), new

  states = [jax.jit(lambda x: codec.init_rounds(x, len(xs)))(xs[0])] * len(xs)
  for step in range(steps):
    means, mean_sent, new = reduce(states, jnp.int32(step))
    shared = [
      [part.value for part in core.shared_parts(state)] for state in new
    ]
    _require(_all_equal(means), f"{codec}: means differ between workers")
    _require(_all_equal(shared), f"{codec}: Shared state differs")
    mean = np.asarray(means[0])
    gap = np.abs(mean - np.asarray(mean_sent)).max(initial=0)
    scale = max(np.abs(a).max(initial=0) for a in (mean, np.asarray(xs)))
    _require(
      not codec.sends_mean or gap <= _TOLERANCE * scale,
      f"{codec}: the mean of what workers sent differs from the mean by {gap}",
    )
    _require(
      core.same_shapes(new, states),
      f"{codec} makes state of {core.shape_strings(new[0])} from one of "
      f"{core.shape_strings(states[0])}",
    )
    states = new


def _answer_rounds(
  codec: codecs.Codec, running: list[codecs.Rounds[codecs.Reduced]]
) -> list[codecs.Reduced]:
  """Runs the rounds of all workers, one message of each at a time."""
  replies: list[PyTree] = [None] * len(running)
  for kind in codec.round_kinds:
    messages = []
    for rounds, reply in zip(running, replies, strict=True):
      try:
        messages.append(rounds.send(reply))
      except StopIteration as stop:
        raise AssertionError(f"{codec} sends no {kind!r}") from stop
    for message in messages:
      _require(
        message.kind == kind
        and core.same_shapes(message.payload, messages[0].payload),
        f"{codec} sends {message.kind!r} of "
        f"{core.shape_strings(message.payload)}, "
        f"not {kind!r} of {core.shape_strings(messages[0].payload)}",
      )
    replies = _answer(messages)
  done: list[codecs.Reduced] = []
  for rounds, reply in zip(running, replies, strict=True):
    try:
      message = rounds.send(reply)
    except StopIteration as stop:
      done.append(stop.value)
    else:
      raise AssertionError(f"{codec} sends one {message.kind!r} more")
  return done


def _answer(messages: list[codecs.Message]) -> list[PyTree]:
  """Returns what each worker receives."""
  payloads = [message.payload for message in messages]

  def stack(*leaves: Any) -> Array:
    return jnp.stack(leaves)

  stacked = jax.tree.map(stack, *payloads)
  workers = range(len(payloads))
  if messages[0].kind == "gather":
    return [stacked for _ in workers]
  if messages[0].kind == "all_to_all":
    return [jax.tree.map(lambda a, r=r: a[:, r], stacked) for r in workers]
  if messages[0].kind == "max":
    return [jax.tree.map(lambda a: a.max(0), stacked) for _ in workers]

  def add(a: Array) -> Array:
    # Words of a sum are equal on all workers and are not added.
    return a.sum(0) if jnp.issubdtype(a.dtype, jnp.floating) else a[0]

  return [jax.tree.map(add, stacked) for _ in workers]


def _all_equal(trees: list[PyTree]) -> bool:
  """Returns whether all trees hold the same bits."""
  bits = {
    tuple(np.asarray(a).tobytes() for a in jax.tree.leaves(tree))
    for tree in trees
  }
  return len(bits) == 1


def _require(holds: bool, message: str) -> None:
  if not holds:
    raise AssertionError(message)
