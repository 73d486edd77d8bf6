"""Checks of the properties of a codec."""

import json
import re
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxmotion import codecs, core, wire
from jaxmotion.codecs.extend import (
  Rounds,
  check_codec as check_codec_of_arrays,
)
from jaxmotion.core import Array, PyTree
from jaxmotion.testing import _laws
from jaxmotion.testing._laws import require

_PAYLOAD_DTYPES = set("uint8 uint16 uint32 float32 float16 bfloat16".split())
# Of a mean of rounds, as a share of the greatest element.
_TOLERANCE = 1e-5


@core.declare(
  codec=check_codec_of_arrays,
  x=_laws.check_array,
  ulps=core.integer(0, 1 << 20),
)
def check_codec(codec: codecs.Codec, x: Array, *, ulps: int = 0) -> None:
  """Checks the properties that hold for every codec, on one finite array.

  * The payload is words, float32 or elements of the array's dtype, of static
    shapes, and has the size that `wire.payload_bytes` states.
  * Compiled and eager calls return the same payload and decode it to the same
    bits; a second call compiles nothing.
  * `vmap` encodes and decodes each row as a single call does.
  * The result has the shape and dtype of `x` and is finite.
  * State keeps its shapes, holds no array twice, and never keeps a non-finite
    element. What `write_memory` writes has these shapes, and `read_memory`
    reads it again.
  * Configuration and `repr` construct an equal codec.
  * Every law that `codec.laws` states holds, on `x` and on arrays made from it
    with zeros, extreme and non-finite elements.

  Args:
    codec: a codec of arrays.
    x: finite floating-point array.
    ulps: distance allowed between float fields of two payloads, and between two
      decoded arrays, in units in the last place of their greatest element. It
      is for codecs that add elements up, which no two programs do in the same
      order. Words must be equal in any case.

  Raises:
    AssertionError: a property does not hold; the message says which.

  Example:
    >>> from jaxmotion import codecs
    >>> check_codec(codecs.uniform(bits=8), jnp.linspace(-1, 1, 100))
  """
  key = core.make_key(7)
  state = codec.init(x)
  traces: list[None] = []

  def encode(x: Array, state: PyTree, key: Any) -> tuple[PyTree, PyTree]:
    traces.append(None)
    return codec.encode(x, state, key)

  jitted = jax.jit(encode)
  payload, new_state = jitted(x, state, key)
  jitted(x, new_state, key)
  require(len(traces) == 1, f"{codec} compiles again on its second call")
  _check_payload(codec, x, payload)
  eager, eager_state = codec.encode(x, state, key)
  for tree in (state, eager_state):
    leaves = jax.tree.leaves(tree)
    require(
      len({id(a) for a in leaves}) == len(leaves),
      f"{codec} holds one array twice in its state",
    )
  require(
    _same_trees(eager, payload, ulps), f"{codec}: jit and eager payloads differ"
  )
  decode = jax.jit(lambda p: codec.decode(p, x))
  y = decode(payload)
  require(
    _same_trees(codec.decode(payload, x), y, ulps),
    f"{codec}: jit and eager decode differ",
  )
  _check_decoded(codec, x, payload, y)
  _check_state(codec, x, state, new_state, jitted)
  _check_rows(codec, x, ulps, jitted, decode)
  _check_config(codec)


@core.declare(
  codec=check_codec_of_arrays, arrays=core.sequence("arrays", _laws.check_array)
)
def check_round_trips(codec: codecs.Codec, arrays: Sequence[Array]) -> None:
  """Checks encoding and decoding alone, of many arrays in one program.

  It checks the properties of `check_codec` that depend on shape and dtype. The
  payload has words of the size that `wire.payload_bytes` states. The result is
  finite, has the shape and dtype of its array, and keeps the error bound of
  `codec.laws`. State keeps its shapes.

  Args:
    codec: a codec of arrays.
    arrays: finite floating-point arrays of any shapes and dtypes.

  Raises:
    AssertionError: a property does not hold; the message says which.

  Example:
    >>> from jaxmotion import codecs
    >>> x = jnp.linspace(-1, 1, 100)
    >>> check_round_trips(codecs.uniform(bits=8), [x, x[:0], x[0]])
  """

  @jax.jit
  def round_trips(arrays: Sequence[Array]) -> list[Any]:
    """Encodes and decodes each array; returns payloads and results."""
    trips = []
    for x in arrays:
      state = codec.init(x)
      payload, new_state = codec.encode(x, state, core.make_key(7))
      _check_state_shapes(codec, state, new_state)
      trips.append((payload, codec.decode(payload, x)))
    return trips

  for x, (payload, y) in zip(arrays, round_trips(arrays), strict=True):
    _check_payload(codec, x, payload)
    _check_decoded(codec, x, payload, y)


def _check_payload(codec: codecs.Codec, x: Array, payload: PyTree) -> None:
  """Requires words or floats, in as many bytes as `wire` states."""
  leaves = jax.tree.leaves(payload)
  for a in leaves:
    name = jnp.dtype(a.dtype).name
    require(
      name in _PAYLOAD_DTYPES,
      f"{codec} has a payload of {name}, not of unsigned integers or floats",
    )
  real = sum(np.asarray(a).nbytes for a in leaves)
  said = wire.payload_bytes(codec, x)
  require(real == said, f"{codec} has {real} bytes, not {said}")


def _check_decoded(
  codec: codecs.Codec, x: Array, payload: PyTree, y: Array
) -> None:
  """Requires a finite result of the same shape that keeps all laws."""
  require(
    y.shape == x.shape and y.dtype == x.dtype,
    f"{codec} decodes {core.shape_string(x)} to {core.shape_string(y)}",
  )
  require(_all_finite(y), f"{codec} makes a finite array non-finite")
  dropped = np.asarray(codec.count_dropped(payload, x))
  trip = _laws.Trip(payload, np.asarray(y)[None], dropped[None])
  _require_laws(
    codec, list(_laws.find_in_rows(codec, np.asarray(x)[None], trip))
  )


def _require_laws(
  codec: codecs.Codec, breaches: Sequence[_laws.Breach]
) -> None:
  for law, row, detail in breaches:
    require(
      False,
      f"{codec} breaks its law {law} on row {row} of `testing.make_rows(x)`: "
      f"{detail}",
    )


def _check_state_shapes(
  codec: codecs.Codec, state: PyTree, new_state: PyTree
) -> None:
  """Requires that encoding keeps the shapes and dtypes of the state."""
  require(
    jax.tree.map(core.shape_string, state)
    == jax.tree.map(core.shape_string, new_state),
    f"{codec} changes the shapes of its state",
  )


def _check_state(
  codec: codecs.Codec,
  x: Array,
  state: PyTree,
  new_state: PyTree,
  encode: Callable[..., Any],
) -> None:
  """Requires a state that a NaN does not stay in."""
  _check_state_shapes(codec, state, new_state)
  if x.size:
    bad = np.array(x)
    bad.flat[0] = np.nan
    _, poisoned = encode(jnp.asarray(bad), state, core.make_key(7))
    kept = codec.canonical_state(poisoned)
    require(_all_finite(kept), f"{codec} keeps a NaN in its state")
  if codec.memory_parts:
    _check_memory(codec, x, new_state)


def _check_memory(codec: codecs.Codec, x: Array, state: PyTree) -> None:
  """Checks that a state of the same memory is like a state of the codec."""

  @jax.jit
  def read_twice(state: PyTree) -> tuple[dict[str, Array], PyTree, Any]:
    parts = codec.read_memory(state, x)
    again = codec.write_memory(parts, parts, x, 1)
    return parts, codec.read_memory(again, x), again

  parts, found, again = read_twice(state)
  _check_state_shapes(codec, codec.init_rounds(x, 1), again)
  for part in codec.memory_parts:
    require(part.name in parts, f"{codec} reads no {part.name!r}")
    if part.row_of is not None:
      continue
    a, b = (np.asarray(tree[part.name]) for tree in (parts, found))
    require(
      a.shape == x.shape and a.dtype == np.float32,
      f"{codec} reads {core.shape_string(a)} as {part.name!r}",
    )
    gap, peak = np.abs(a - b).max(initial=0), np.abs(a).max(initial=0)
    require(
      gap <= 1e-6 * peak,
      f"{codec} writes {part.name!r} with an error of {gap}",
    )


def _check_rows(
  codec: codecs.Codec,
  x: Array,
  ulps: int,
  encode: Callable[..., Any],
  decode: Callable[..., Array],
) -> None:
  """Checks what `vmap` makes of rows, and the laws on them."""
  if not x.size:
    return
  rows = _laws.make_rows(np.asarray(x))
  trip = _laws.run_trip(codec, jnp.asarray(rows), 7)
  payload = jax.tree.map(np.asarray, trip.payload)
  for i in range(2):
    own, _ = encode(jnp.asarray(rows[i]), codec.init(x), core.make_key(7, i))
    require(
      _same_trees(own, jax.tree.map(lambda a, i=i: a[i], payload), ulps),
      f"{codec}: vmap and single payloads differ",
    )
    require(
      _same_trees(decode(own), trip.y[i], ulps),
      f"{codec}: vmap and single decode differ",
    )
  _require_laws(codec, _laws.find_breaches(codec, jnp.asarray(rows), seed=7))


def _check_config(codec: codecs.Codec) -> None:
  """Requires that `config` and `repr` construct an equal codec."""
  config = json.loads(json.dumps(codec.config()))
  require(
    codecs.Codec.from_config(config) == codec, f"{codec} is not its config"
  )
  require(
    hash(codecs.Codec.from_config(config)) == hash(codec),
    f"{codec}: hash differs",
  )
  named = set(re.findall(r'"name": "(\w+)"', json.dumps(config)))
  if named <= vars(codecs).keys():  # Codecs of users may have other `repr`s.
    again = eval(repr(codec), vars(codecs))
    require(again == codec, f"{codec} is not its repr")


@core.declare(
  codec=check_codec_of_arrays,
  x=_laws.check_array,
  samples=core.integer(1, 1 << 20),
  sigmas=core.number(0, open_low=True),
)
def check_unbiased(
  codec: codecs.Codec, x: Array, *, samples: int = 400, sigmas: float = 5.0
) -> None:
  """Checks that the mean of many encodings is the array itself.

  Args:
    codec: a codec without state that rounds or samples at random.
    x: finite floating-point array.
    samples: number of encodings, with different keys.
    sigmas: number of standard errors of the mean that an element may be off.

  Raises:
    AssertionError: the mean of an element is further off.

  Example:
    >>> from jaxmotion import codecs
    >>> codec = codecs.uniform(bits=2, rounding="stochastic")
    >>> check_unbiased(codec, jnp.linspace(-1, 1, 10))
  """

  def round_trip(i: Array) -> Array:
    # Both words of the key change: some codecs round by one, some sample by
    # the other.
    payload, _ = codec.encode(x, codec.init(x), core.make_key(i, worker=i))
    return codec.decode(payload, x)

  drawn = np.asarray(
    jax.jit(jax.vmap(round_trip))(jnp.arange(samples)), np.float64
  )
  excess = _laws.excess_bias(drawn, np.asarray(x, np.float64), sigmas)
  require(excess <= 0, f"{codec} is biased by {excess} beyond {sigmas} sigmas")


def _same_trees(a: PyTree, b: PyTree, ulps: int = 0) -> bool:
  return core.same_structure(a, b) and all(
    _same_arrays(np.asarray(p), np.asarray(q), ulps)
    for p, q in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
  )


def _same_arrays(a: np.ndarray, b: np.ndarray, ulps: int) -> bool:
  if a.tobytes() == b.tobytes():
    return True
  if not ulps or not jnp.issubdtype(a.dtype, jnp.floating):
    return False
  unit = float(jnp.finfo(a.dtype).eps) * float(np.max(np.abs(a), initial=0))
  return bool(np.all(np.abs(a - b) <= ulps * unit))


def _all_finite(tree: PyTree) -> bool:
  return all(
    bool(np.isfinite(np.asarray(a, np.float64)).all())
    for a in jax.tree.leaves(tree)
  )


@core.declare(
  codec=check_codec_of_arrays, xs=_laws.check_array, steps=core.integer(1, 1000)
)
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
  if not codec.round_kinds:
    raise ValueError(f"`codec` must have `round_kinds`, got {codec!r}.")
  if jnp.ndim(xs) < 1 or not len(xs):
    raise ValueError(
      f"`xs` must have a leading axis of workers, got shape {jnp.shape(xs)}."
    )

  @jax.jit
  def reduce(states: list[PyTree], step: Array) -> tuple[Any, ...]:
    """Returns all workers' means, the mean of what was sent, and states."""
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
    require(_all_equal(means), f"{codec}: means differ between workers")
    require(_all_equal(shared), f"{codec}: Shared state differs")
    mean = np.asarray(means[0])
    gap = np.abs(mean - np.asarray(mean_sent)).max(initial=0)
    scale = max(np.abs(a).max(initial=0) for a in (mean, np.asarray(xs)))
    require(
      not codec.sends_mean or gap <= _TOLERANCE * scale,
      f"{codec}: the mean of what workers sent differs from the mean by {gap}",
    )
    require(
      core.same_shapes(new, states),
      f"{codec} makes state of {core.shape_strings(new[0])} from one of "
      f"{core.shape_strings(states[0])}",
    )
    states = new


def _answer_rounds(
  codec: codecs.Codec, running: list[Rounds[codecs.Reduced]]
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
      require(
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
  """Answers all workers' messages as the collective of their kind would."""
  payloads = [message.payload for message in messages]
  stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *payloads)

  def reply(a: Array, worker: int) -> Array:
    """Returns what one worker gets of a leaf stacked over workers."""
    match messages[0].kind:
      case "gather":
        return a
      case "all_to_all":
        return a[:, worker]
      case "max":
        return a.max(0)
    # Words of a sum are equal on all workers and are not added.
    return a.sum(0) if jnp.issubdtype(a.dtype, jnp.floating) else a[0]

  return [
    jax.tree.map(lambda a, r=r: reply(a, r), stacked)
    for r in range(len(payloads))
  ]


def _all_equal(trees: list[PyTree]) -> bool:
  """Returns whether all trees hold the same bits."""
  bits = {
    tuple(np.asarray(a).tobytes() for a in jax.tree.leaves(tree))
    for tree in trees
  }
  return len(bits) == 1
