"""Codecs of several rounds, whose payload depends on other workers."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxmotion import core, kernels
from jaxmotion.codecs import _bases, _checks, _codec, _laws, _rounds
from jaxmotion.codecs._combinators import _selection
from jaxmotion.core import Array, PyTree, ShapedLike
from jaxmotion.kernels import pack

# A column that keeps less of its norm than this, after projections onto those
# before it, holds rounding errors and nothing else.
_MIN_KEPT = 1e-5
_OF_MEAN = _laws.MemoryPart("error_of_mean", is_pending=True, row_of="error")


class Ef21(NamedTuple):
  """State of `ef21` for one array."""

  own: Array  # float32 of the array's shape, what this worker has sent in all.
  mean: core.Shared  # The mean of it over workers, equal on all of them.
  inner: PyTree = ()  # The wrapped codec's state.


@dataclasses.dataclass(frozen=True)
@core.declare(codec=_codec.check_codec)
class ef21(_bases.MemoryCodec, _bases.MultiRoundCodec):
  """Encodes the difference to what was sent before (EF21).

  Worker r sends c_r = encode(x_r - h_r), and h_r grows by decode(c_r). All know
  the mean of h_r, which is the result. What is left out now is left in the next
  difference, so that no error adds up: it takes the place of `feedback`.

  Properties: the mean is that of h_r, exactly but for float32 rounding. While
  the arrays stay the same, h_r approaches x_r by the codec's contraction. With
  `identity` it is the mean itself. It starts from zero. An element that is not
  finite reaches the result, but not the state.

  Payloads are gathered, or summed if they may be, so bytes grow with the
  workers. A second encoding of their mean would not be what workers remember.

  Args:
    codec: encodes differences, such as `topk(density=0.01)`; one that bounds
      the memory of `feedback`.

  Example:
    >>> from jaxmotion.codecs import topk
    >>> codec, x = ef21(topk(density=0.5)), jnp.array([1.0, 3.0])
    >>> _, state = codec.encode(x, codec.init(x))
    >>> _, later = codec.encode(x, state)
    >>> state.own.tolist(), later.own.tolist()
    ([0.0, 3.0], [1.0, 3.0])

  References:
    Richtarik, Sokolov and Fatkhullin, *EF21: A New, Simpler, Theoretically
    Better, and Practically Faster Error Feedback*, 2021.
  """

  _part = _laws.SENT

  def __post_init__(self) -> None:
    if not self.codec.laws.bounds_memory:
      raise ValueError(
        "`codec` must bound the error memory (`codec.laws.bounds_memory`), got "
        f"{self.codec!r}: its error may be greater than the difference."
      )
    if isinstance(self.codec, _selection.contributors):
      raise ValueError(
        "`codec` must send parts of the mean over all workers, got "
        f"{self.codec!r}."
      )

  @property
  def round_kinds(self) -> tuple[str, ...]:
    """Kinds of its messages: one sum or gather, or the codec's own."""
    if self.codec.round_kinds:
      return self.codec.round_kinds
    return ("sum",) if self.codec.summable else ("gather",)

  @core.declare(like=_checks.check_shaped)
  def init(self, like: ShapedLike) -> Ef21:
    """Returns zeros, and the wrapped codec's state."""
    own, mean = (jnp.zeros(like.shape, jnp.float32) for _ in range(2))
    return Ef21(own, core.Shared(mean), self.codec.init(like))

  def reduce_in_rounds(
    self, x: Array, state: Ef21, key: core.Key | None, workers: int
  ) -> _rounds.Rounds[_rounds.Reduced]:
    """Reduces the differences with the wrapped codec."""
    self._check_input(x, key)
    self._check_state(state, x)
    change = x.astype(jnp.float32) - state.own
    moved, sent, inner = yield from self._reduce(
      change, state.inner, key, workers
    )
    mean = state.mean.value + moved
    # All workers leave out the same elements: the mean stays that of `own`.
    usable = jnp.isfinite(mean)
    own = state.own + self.codec.decode(sent, change)
    own = jnp.where(usable & jnp.isfinite(own), own, state.own)
    shared_mean = core.Shared(jnp.where(usable, mean, state.mean.value))
    return _rounds.Reduced(mean, sent, Ef21(own, shared_mean, inner))

  def _reduce(
    self, x: Array, state: PyTree, key: core.Key | None, workers: int
  ) -> _rounds.Rounds[tuple[Array, PyTree, PyTree]]:
    """Returns the mean of what is sent, this worker's part, and the state."""
    if self.codec.round_kinds:
      return (yield from self.codec.reduce_in_rounds(x, state, key, workers))
    payload, state = self.codec.encode(x, state, key)
    if self.codec.summable:
      total = yield _rounds.Message("sum", payload)
      return self.codec.decode(total, x) / workers, payload, state
    payloads = yield _rounds.Message("gather", payload)
    return self.codec.sum_decoded(payloads, x) / workers, payload, state

  def _read_part(self, state: Ef21) -> Array:
    return state.own

  def _write_part(self, own: Array, mean: Array) -> Ef21:
    # All workers know the mean of what was sent.
    return Ef21(own, core.Shared(mean))

  def _check_state(self, state: Any, like: ShapedLike | None = None) -> None:
    """Raises unless a state is one of `ef21`, of an array like this."""
    fits = (
      isinstance(state, Ef21)
      and isinstance(state.mean, core.Shared)
      and (like is None or jnp.shape(state.own) == like.shape)
    )
    _checks.check_state(self, state, fits)


class Factors(NamedTuple):
  """Payload of `low_rank`: the matrix is left @ right.T."""

  # One factor has orthonormal columns, equal on all workers; the other is a
  # worker's own.
  left: Array  # float32[rows, rank].
  right: Array  # float32[columns, rank].


@dataclasses.dataclass(frozen=True, kw_only=True)
@core.declare(
  rank=core.integer(1, 1 << 16),
  seed=core.seed,
  sends=core.choice(("both", "left", "right")),
  view=core.choice(("last", "first")),
)
class low_rank(_bases.MultiRoundCodec):
  """Approximates the workers' mean by a matrix of low rank (PowerSGD).

  Let x_r be the matrix of worker r, and q the last step's right factor. Then
  p = orth(sum_r x_r orth(q)), q = mean_r x_r^T p, and the mean is p q^T. It
  takes two sums, however many workers and matrices there are; each worker sends
  (rows + columns) rank elements for rows x columns. Put it in `feedback`, which
  sends later what is left out.

  With `sends="right"` the left factor p = orth(left) is that of the last steps.
  Only q = mean_r x_r^T p is sent, in one sum; `sends="left"` mirrors it. Steps
  that send them in turn share their state: an `exchange` through both codecs,
  with `schedule=lambda count: count % 2`, halves the bytes.

  An array of more dimensions is a matrix of its last dimension by all others,
  which fits kernels of convolutions (height, width, in, out). `view="first"`
  takes the first one, which fits PyTorch's (out, in, height, width). A vector
  is a matrix of one row, for which the factors are larger than the vector: give
  vectors another codec, by `rules`.

  Properties: exact from rank min(rows, columns) on, up to float32 rounding; the
  error of one worker's matrix is no greater than the matrix. A column that is
  zero, not finite or dependent on others is replaced by a random one. So the
  factor keeps its rank whatever the gradients are.

  Args:
    rank: of the approximation, 1 to 65536.
    seed: of the first factors, 0 to 2^32 - 1.
    sends: "both" factors, or the "left" or the "right" one alone.
    view: the dimension of an array that is one of the matrix, "last" or
      "first".

  Example:
    >>> x = jnp.outer(jnp.arange(4.0), jnp.ones(3))
    >>> codec = low_rank(rank=1)
    >>> payload, state = codec.encode(x, codec.init(x))
    >>> jnp.round(codec.decode(payload, x), 4)[:, 0].tolist()
    [0.0, 1.0, 2.0, 3.0]

  References:
    Vogels, Karimireddy and Jaggi, *PowerSGD: Practical Low-Rank Gradient
    Compression for Distributed Optimization*, 2019, algorithms 1 and 2. Code of
    the steps in turn: epfml/powersgd, commit f07be92.
  """

  rank: int
  seed: int = 0
  sends: str = "both"
  view: str = "last"

  # Those of a projection onto some columns.
  laws = _laws.Laws(bounds_memory=True, nonfinite="array")

  @property
  def round_kinds(self) -> tuple[str, ...]:
    """Kinds of its messages: a sum for each factor that it sends."""
    return ("sum", "sum") if self.sends == "both" else ("sum",)

  @core.declare(like=_checks.check_shaped)
  def init(self, like: ShapedLike) -> core.Shared:
    """Returns random factors, the same on all workers."""
    rows, columns, rank = self._dimensions(like)
    right = _random_columns(self.seed, columns, rank)
    if self.sends == "both":
      return core.Shared(right)
    return core.Shared(Factors(_random_columns(self.seed, rows, rank), right))

  def reduce_in_rounds(
    self, x: Array, state: core.Shared, key: core.Key | None, workers: int
  ) -> _rounds.Rounds[_rounds.Reduced]:
    """Sums the left factors, then the right ones, or those of one side."""
    # p and q are the orthonormal factors, as the paper calls them.
    self._check_input(x, key)
    self._check_state(state)
    rows, columns, rank = self._dimensions(x)
    shapes = [a.shape for a in jax.tree.leaves(state)]
    if shapes != [(rows, rank), (columns, rank)][-len(shapes) :]:
      raise ValueError(
        f"`state` must be what `init` returned for {core.shape_string(x)}, got "
        f"factors of shapes {shapes}."
      )
    matrix = x.reshape(rows, columns).astype(jnp.float32)
    if self.sends == "left":
      left, right = state.value
      q, own, mean, new = yield from self._project(
        matrix.T, right, left, workers
      )
      next_state: PyTree = Factors(new, right)
      return self._reduced(x, Factors(own, q), Factors(mean, q), next_state)
    if self.sends == "both":
      right = state.value
      q = self._orthonormalize(right)
      left = yield _rounds.Message("sum", _matmul(matrix, q))
    else:
      left, right = state.value
    p, own, mean, new = yield from self._project(matrix, left, right, workers)
    next_state = new if self.sends == "both" else Factors(left, new)
    return self._reduced(x, Factors(p, own), Factors(p, mean), next_state)

  def _project(
    self, matrix: Array, columns: Array, old: Array, workers: int
  ) -> _rounds.Rounds[tuple[Array, Array, Array, Array]]:
    """Projects each worker's matrix onto columns; averages the other factor."""
    # Returns the basis, the own factor, the workers' mean of it, and the factor
    # that the next step starts from.
    basis = self._orthonormalize(columns)
    own = _matmul(matrix.T, basis)
    total = yield _rounds.Message("sum", own)
    mean = total / workers
    # A layer without a gradient must not end the power iteration.
    usable = jnp.isfinite(mean).all(0) & (mean != 0).any(0)
    return basis, own, mean, jnp.where(usable, mean, old)

  def _reduced(
    self, x: Array, sent: Factors, mean: Factors, state: PyTree
  ) -> _rounds.Reduced:
    product = _matmul(mean.left, mean.right.T)
    return _rounds.Reduced(product.reshape(x.shape), sent, core.Shared(state))

  def _orthonormalize(self, columns: Array) -> Array:
    spare = _random_columns(self.seed, *columns.shape)
    return orthonormalize(columns, spare)

  def decode(self, payload: Factors, like: ShapedLike) -> Array:
    """Returns the product of the factors."""
    self._check_payload(payload, like)
    y = _matmul(payload.left, payload.right.T).reshape(like.shape)
    return core.saturate_cast(y, like.dtype)

  def _dimensions(self, like: ShapedLike) -> tuple[int, int, int]:
    """Returns the rows and columns of the matrix, and the factors' rank."""
    cut = max(0, len(like.shape) - 1) if self.view == "last" else 1
    rows, columns = math.prod(like.shape[:cut]), math.prod(like.shape[cut:])
    return rows, columns, min(rows, columns, self.rank)

  def _check_state(self, state: Any, like: ShapedLike | None = None) -> None:
    """Raises unless a state is shared factors, as many as are sent."""
    leaves = jax.tree.leaves(state)
    fits = (
      isinstance(state, core.Shared)
      and len(leaves) == (1 if self.sends == "both" else 2)
      and all(jnp.ndim(a) == 2 for a in leaves)
    )
    _checks.check_state(self, state, fits)


def orthonormalize(columns: Array, spare: Array) -> Array:
  """Returns orthonormal columns that span those given, by Gram-Schmidt."""
  # `columns`: float32[n, rank], rank at most n.
  # `spare`: float32[n, rank], independent columns. One takes the place of each
  # column that is zero, not finite or dependent on those before it.
  done: list[Array] = []

  def remove_done(column: Array) -> Array:
    for unit in done:
      column = column - jnp.sum(unit * column) * unit
    return column

  for i in range(columns.shape[1]):
    column = columns[:, i]
    greatest = jnp.max(jnp.abs(column))
    usable = (greatest > 0) & jnp.isfinite(greatest)
    # Scaled first: squares of large and small elements leave float32.
    column = jnp.where(usable, column / jnp.where(usable, greatest, 1.0), 0.0)
    before = _norm(column)
    column = remove_done(column)
    after = _norm(column)
    usable &= after > _MIN_KEPT * before
    other = remove_done(remove_done(spare[:, i]))
    column = jnp.where(
      usable, column / jnp.where(after > 0, after, 1.0), other / _norm(other)
    )
    column = remove_done(column)  # Once more, for orthogonality to float32.
    done.append(column / _norm(column))
  return jnp.stack(done, axis=1) if done else columns


def _norm(column: Array) -> Array:
  return jnp.sqrt(jnp.sum(column * column))


def _matmul(a: Array, b: Array) -> Array:
  # Accelerators multiply float32 in fewer bits by default.
  return jnp.matmul(a, b, precision=lax.Precision.HIGHEST)


def _random_columns(seed: int, rows: int, rank: int) -> Array:
  """Draws columns of normal elements from the seed alone (Box-Muller)."""
  words = core.random_words(core.make_key(seed).shared, (2, rank, rows))
  # In (0, 1), so that the logarithm is finite.
  u, v = (words >> 8).astype(jnp.float32) * 2.0**-24 + 2.0**-25
  return (jnp.sqrt(-2.0 * jnp.log(u)) * jnp.cos(2.0 * jnp.pi * v)).T


class Onebit(NamedTuple):
  """State of `onebit` for one array."""

  # float32[padded size], the error of what this worker sent.
  own: Array
  # float32[padded size / workers], that of the mean of its row.
  of_mean: Array


class OneMagnitude(NamedTuple):
  """Payload of packed signs and one magnitude."""

  words: Array  # uint32[1, columns], signs of the elements, flat and packed.
  scale: Array  # float32[], the magnitude of all of them.


@dataclasses.dataclass(frozen=True)
class onebit(_bases.MultiRoundCodec):
  """Reduces signs in two phases, with error memory of both (1-bit Adam).

  With b = x + e_r on worker r and n elements: it sends the signs of b and s =
  ||b|| / sqrt(n), and remembers e_r = b - s sign(b). A worker averages one row
  of all arrays, and adds its error of that row. It sends signs and magnitude of
  the sum to all, with an error alike. Zero counts as positive.

  It is here for parity with DeepSpeed. `feedback(sign())` with the method
  "two_phase" loses less, because it has a magnitude for each block instead of
  each array.

  Properties: zeros fill rows to a multiple of 8 workers / gcd(8, workers). They
  count in n and have errors as well. An error that is not finite is forgotten.

  Example:
    >>> x = jnp.array([3.0, -1.0])
    >>> payload, state = onebit().encode(x, onebit().init(x))
    >>> [round(float(y), 4) for y in onebit().decode(payload, x)]
    [1.118, -1.118]

  References:
    Tang et al., *1-bit Adam: Communication Efficient Large-Scale Training with
    Adam's Convergence Speed*, 2021. Code: deepspeedai/DeepSpeed, commit
    edaa722, runtime/comm/nccl.py.
  """

  laws = _laws.Laws(nonfinite="array")
  # Those of two phases.
  round_kinds = ("all_to_all", "gather")
  # The error of what was sent, and one row of that of the mean.
  memory_parts = (_laws.ERROR, _OF_MEAN)

  def init(self, like: ShapedLike) -> Onebit:
    """Returns the state of a worker that has no others."""
    return self.init_rounds(like, 1)

  @core.declare(like=_checks.check_shaped, workers=core.integer(1, 1 << 24))
  def init_rounds(self, like: ShapedLike, workers: int) -> Onebit:
    """Returns zero errors for this number of workers."""
    row = _row_length(like, workers)
    return Onebit(
      jnp.zeros(row * workers, jnp.float32), jnp.zeros(row, jnp.float32)
    )

  def reduce_in_rounds(
    self, x: Array, state: Onebit, key: core.Key | None, workers: int
  ) -> _rounds.Rounds[_rounds.Reduced]:
    """Exchanges rows, then the signs of their means."""
    self._check_input(x, key)
    self._check_state(state, x, workers)
    row = _row_length(x, workers)
    flat = x.reshape(-1).astype(jnp.float32)
    value = jnp.pad(flat, (0, row * workers - flat.size)) + state.own
    scale = _root_mean_square(value)
    rows = jax.vmap(_pack_signs)(value.reshape(workers, row))
    own = kernels.clear_error(value - scale * _signs(value))
    sent = OneMagnitude(rows, jnp.broadcast_to(scale, (workers,)))
    received = yield _rounds.Message("all_to_all", sent)
    own_row = _decode_rows(received, row).sum(0) / workers + state.of_mean
    scale_of_mean = _root_mean_square(own_row)
    of_mean = kernels.clear_error(own_row - scale_of_mean * _signs(own_row))
    payload = OneMagnitude(_pack_signs(own_row), scale_of_mean)
    payloads = yield _rounds.Message("gather", payload)
    mean = _decode_rows(payloads, row).reshape(-1)[: flat.size]
    whole = OneMagnitude(_pack_signs(value[: flat.size]), scale)
    return _rounds.Reduced(mean.reshape(x.shape), whole, Onebit(own, of_mean))

  @core.declare(like=_checks.check_shaped)
  def read_memory(self, state: Onebit, like: ShapedLike) -> dict[str, Array]:
    """Returns both errors, without the padding of this worker's own."""
    self._check_state(state)
    workers = max(1, state.own.size // max(1, state.of_mean.size))
    self._check_state(state, like, workers)
    own = state.own[: math.prod(like.shape)].reshape(like.shape)
    return {"error": own, "error_of_mean": state.of_mean}

  @_checks.declare_parts
  def write_memory(
    self,
    parts: Mapping[str, Array],
    means: Mapping[str, Array],
    like: ShapedLike,
    workers: int,
  ) -> Onebit:
    """Returns a state whose padding, and whose row, have no error."""
    _checks.check_parts(self, parts, means, like)
    fresh = self.init_rounds(like, workers)
    error = parts["error"].reshape(-1).astype(jnp.float32)
    padding = fresh.own.size - error.size
    return fresh._replace(own=jnp.pad(error, (0, padding)))

  def decode(self, payload: OneMagnitude, like: ShapedLike) -> Array:
    """Returns plus or minus the magnitude."""
    self._check_payload(payload, like)
    size = math.prod(like.shape)
    y = _unpack_signs(payload.words, size) * payload.scale
    return core.saturate_cast(y.reshape(like.shape), like.dtype)

  def _check_state(
    self, state: Any, like: ShapedLike | None = None, workers: int = 1
  ) -> None:
    """Raises unless a state is one of `onebit`, of rows of this length."""
    fits = isinstance(state, Onebit)
    if fits and like is not None:
      row = _row_length(like, workers)
      shapes = jnp.shape(state.own), jnp.shape(state.of_mean)
      fits = shapes == ((row * workers,), (row,))
    if not fits:
      raise ValueError(
        f"`state` must be what `init_rounds` returned for {self!r} and this "
        f"number of workers, got {state!r:.200}."
      )


def _row_length(like: ShapedLike, workers: int) -> int:
  unit = 8 * workers // math.gcd(8, workers)
  return -(-math.prod(like.shape) // (unit * workers)) * unit


def _root_mean_square(b: Array) -> Array:
  # In units of the greatest element, whose square may leave float32.
  peak = jnp.max(jnp.abs(b), initial=0.0)
  unit = jnp.where(peak > 0, peak, 1.0)
  squares = jnp.sum((b / unit) ** 2)
  return unit * jnp.sqrt(squares) / math.sqrt(max(1, b.size))


def _signs(b: Array) -> Array:
  return jnp.where(b < 0, -1.0, 1.0)


def _pack_signs(b: Array) -> Array:
  return pack.pack_flat((b < 0).astype(jnp.uint32), 1)


def _unpack_signs(words: Array, count: int) -> Array:
  bits = pack.unpack_flat(words, 1, words.size * 32)[:count]
  return 1.0 - 2.0 * bits.astype(jnp.float32)


def _decode_rows(payloads: PyTree, row: int) -> Array:
  """Returns float32[rows, elements of a row]."""
  signs = jax.vmap(lambda words: _unpack_signs(words, row))(payloads.words)
  return signs * payloads.scale[:, None]
