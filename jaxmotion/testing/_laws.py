"""Checks of the laws that a codec states."""

import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxmotion import codecs, core
from jaxmotion.codecs.extend import check_codec
from jaxmotion.core import Array, PyTree

# Steps of error feedback; two halves are compared.
_STEPS = 128
# Encodings whose mean is compared with the array, or its energy.
_SAMPLES = 400
_SIGMAS = 6.0


class Breach(NamedTuple):
  """A law that an array breaks.

  Attributes:
    law: name of the field of `Laws`, or of the codec.
    row: the array's position among the rows.
    detail: what was found.

  Example:
    >>> from jaxmotion import codecs, testing
    >>> class overstated(codecs.uniform):
    ...   laws = codecs.Laws(lossless=True)
    >>> rows = testing.make_rows(np.linspace(-1, 1, 64, dtype=np.float32))
    >>> testing.find_breaches(overstated(bits=8), rows)[0].law
    'lossless'
  """

  law: str
  row: int
  detail: str


class Trip(NamedTuple):
  """Result of encoding and decoding rows of arrays."""

  payload: PyTree  # Leaves with a leading axis of rows.
  y: np.ndarray  # The decoded rows.
  dropped: np.ndarray  # Number of dropped elements of each row.


class _Sample(NamedTuple):
  """Arrays of one shape, their encodings, and which of them laws are for."""

  codec: codecs.Codec
  x: np.ndarray
  usable: list[int]  # Rows for which the laws of norms are stated.
  first: Trip
  run: Callable[..., Trip]  # (rows, seed) to the trip of other rows.


def check_array(name: str, x: Any) -> Any:
  """Returns a floating-point array with values, or raises."""
  noun = "a floating-point array outside of jit"
  core.instance((jax.Array, np.ndarray), noun)(name, x)
  if isinstance(x, jax.core.Tracer):
    raise TypeError(f"`{name}` must be {noun}, got {x!r}.")
  return core.float_array(name, x)


@core.declare(codec=check_codec, rows=check_array, seed=core.seed)
def find_breaches(
  codec: codecs.Codec, rows: Array, *, seed: int = 0
) -> list[Breach]:
  """Checks every law that a codec states on rows of arrays, in one program.

  Rows of equal shape and dtype share their compilation, also between calls.
  A law is checked on the rows for which it is stated: see `codecs.Laws`.

  Args:
    codec: codec of arrays.
    rows: floating-point [rows, ...]; each row is one array, of any elements.
    seed: of the codec's randomness.

  Returns:
    The breaches, empty if every law holds.

  Example:
    >>> from jaxmotion import codecs
    >>> find_breaches(codecs.uniform(bits=8), jnp.eye(3))
    []
  """
  if rows.ndim < 1:
    raise ValueError(
      f"`rows` must have a leading axis, got {core.shape_string(rows)}."
    )
  rows = jnp.asarray(rows)
  if not rows.size:
    return []
  trip = functools.partial(run_trip, codec)
  first = trip(rows, seed)
  x = np.asarray(rows)
  breaches = [*find_in_rows(codec, x, first)]
  usable = [
    i
    for i, row in enumerate(x)
    if _is_finite(codec, row).all() and 0 < _peak(row) <= codec.laws.largest
  ]
  sample = _Sample(codec, x, usable, first, trip)
  breaches += _find_in_energy(sample)
  if codec.laws.idempotent:
    again = trip(jnp.asarray(first.y), seed)
    for i in range(len(x)):
      finite = _is_finite(codec, x[i]).all()
      if finite and not _same_bits(again.y[i], first.y[i]):
        breaches.append(Breach("idempotent", i, "the second decode differs"))
  if codec.summable:
    breaches += _find_in_sums(sample)
  # Rows have no past here, which a codec with state may need.
  if codec.laws.bounds_memory and usable and not codec.has_state:
    breaches += _find_in_memory(sample)
  if codec.needs_key and usable:
    breaches += _find_in_means(sample)
  return breaches


@functools.lru_cache(maxsize=256)
def _programs(
  codec: codecs.Codec, like: jax.ShapeDtypeStruct
) -> tuple[Any, ...]:
  """Compiles encoding and decoding of stacked arrays, once for all checks."""

  def encode(x: Array, worker: Array, seed: Array) -> tuple[PyTree, Array]:
    payload, _ = codec.encode(x, codec.init(x), core.make_key(seed, worker))
    return payload, codec.count_dropped(payload, like)

  decode = jax.vmap(lambda payload: codec.decode(payload, like))
  return jax.jit(jax.vmap(encode)), jax.jit(decode)


@core.declare(x=check_array)
def make_rows(x: np.ndarray) -> np.ndarray:
  """Returns arrays that codecs find hard, made from one finite array.

  They hold zeros of both signs, equal elements, subnormal and greatest floats,
  mixed scales, heavy tails, one element alone or far beyond the others, and NaN
  and infinities at some places.

  Args:
    x: finite floating-point array.

  Returns:
    [rows, ...] of its dtype.

  Example:
    >>> rows = make_rows(np.linspace(-1, 1, 5, dtype=np.float32))
    >>> rows.shape, int(np.isnan(rows).sum())
    ((16, 5), 2)
  """
  x = np.asarray(x)
  info = jnp.finfo(x.dtype)
  base = _wide(x).reshape(-1)
  peak, order = _peak(base) or 1.0, np.arange(base.size)
  signs = np.where(order % 3 == 1, -1.0, 1.0)
  most, least = float(info.max), float(info.smallest_subnormal)
  rows = [
    base,
    -base,
    0 * base,
    np.where(order % 3 == 0, 0.0, base),
    np.where(order == order.size // 2, 3.0, -0.0),
    np.ones(base.size),
    -0.7 * np.ones(base.size),
    base * 10.0 ** (4 * np.sin(order)),
    signs * least * (1 + order % 97),
    base / peak * most,
    signs * most,
    np.where(order == order.size // 3, 10 * np.linalg.norm(base), base),
    base / (1e-3 + 0.618 * order % 1),
  ]
  for places in (
    {0: np.nan},
    {-1: np.inf, 0: -np.inf},
    {-1: np.nan, 1: np.inf},
  ):
    bad = base.copy()
    for place, value in places.items():
      bad[place % base.size] = value
    rows.append(bad)
  with np.errstate(over="ignore", invalid="ignore"):
    return np.stack(rows).astype(x.dtype).reshape(len(rows), *x.shape)


def run_trip(codec: codecs.Codec, rows: Array, seed: int | np.ndarray) -> Trip:
  """Encodes and decodes rows, each as the worker of its number."""
  # `rows`: floating-point [rows, ...].
  like = jax.ShapeDtypeStruct(rows.shape[1:], rows.dtype)
  encode, decode = _programs(codec, like)
  workers = np.arange(rows.shape[0], dtype=np.uint32)
  seeds = np.broadcast_to(np.asarray(seed, np.uint32), workers.shape)
  payload, dropped = encode(rows, workers, seeds)
  return Trip(payload, np.asarray(decode(payload)), np.asarray(dropped))


def find_in_rows(
  codec: codecs.Codec, x: np.ndarray, trip: Trip
) -> Iterator[Breach]:
  """Checks the laws of single elements on every row."""
  laws = codec.laws
  for i, (a, b) in enumerate(zip(x, trip.y, strict=True)):
    if trip.dropped[i]:
      continue
    finite, kept = _is_finite(codec, a), np.isfinite(b)
    if laws.lossless and a.itemsize <= 4 and not _same_bits(a, b):
      yield Breach("lossless", i, f"{_count(a, b)} elements differ")
    if not finite.all():
      if not _follows_nonfinite(laws.nonfinite, finite, kept):
        detail = f"{(~finite).sum()} non-finite elements, {(~kept).sum()} left"
        yield Breach("nonfinite", i, detail)
      continue
    if laws.keeps_finite and not kept.all():
      yield Breach("keeps_finite", i, f"{(~kept).sum()} are not finite")
    if _peak(a) > laws.largest:
      continue
    if laws.keeps_zeros and (b[a == 0] != 0).any():
      yield Breach("keeps_zeros", i, f"zeros became {b[a == 0]}")
    if laws.error:
      excess = _excess_error(codec, laws.error, a, b)
      if not excess <= 0:
        yield Breach("error", i, f"off by {excess} beyond the bound")


def _is_finite(codec: codecs.Codec, a: np.ndarray) -> np.ndarray:
  """Returns which elements are finite to a codec."""
  if codec.keeps_dtype:
    return np.isfinite(a)
  # Codecs compute in float32, and so does their memory.
  with np.errstate(over="ignore"):
    return np.isfinite(a.astype(np.float32))


def _follows_nonfinite(law: str, finite: np.ndarray, kept: np.ndarray) -> bool:
  """Returns whether elements that are not finite decode as the law states."""
  match law:
    case "element":
      return bool((finite == kept).all())
    case "block":
      return not bool(kept[~finite].any())
    case "array":
      return not bool(kept.all())
  return True


def _excess_error(
  codec: codecs.Codec, error: codecs.ErrorBound, a: np.ndarray, b: np.ndarray
) -> float:
  """Returns by how much the worst element exceeds its bound."""
  exact, decoded = _wide(a), _wide(b)
  bound = error.relative * np.abs(exact) + error.peak * _peak(a) + error.floor
  with np.errstate(invalid="ignore", over="ignore"):
    excess = (
      np.abs(decoded - exact) - bound * (1 + 1e-6) - _rounding(codec, a, b)
    )
  if not np.isfinite(decoded).all():
    return np.inf
  return float(np.max(excess, initial=-np.inf))


def _rounding(codec: codecs.Codec, a: np.ndarray, b: np.ndarray) -> np.ndarray:
  """Returns the error of rounding a result to the dtype of its array."""
  info = jnp.finfo(a.dtype)
  eps = float(info.eps)
  if not codec.keeps_dtype:
    eps = max(eps, float(jnp.finfo(jnp.float32).eps))
  lost = np.zeros(a.shape)
  if a.dtype.itemsize == 8 and not codec.keeps_dtype:
    # Rounded to float32 first.
    lost += np.abs(_wide(a)) * eps + float(jnp.finfo(jnp.float32).tiny)
  if codec.laws.lossless:
    return lost
  return lost + np.abs(_wide(b)) * eps + float(info.smallest_subnormal)


def _find_in_energy(sample: _Sample) -> Iterator[Breach]:
  """Checks the laws of squared norms, contraction and projection, on rows."""
  codec, x, usable, trip, _ = sample
  laws = codec.laws
  for i in usable:
    # Elements that are tiny or huge have no square in float64, and a codec
    # without a stated error has no stated floor.
    least = 1e-100 if laws.error else 1e-30
    if trip.dropped[i] or not least < _peak(x[i]) < 1e100:
      continue
    whole = _energy(_wide(x[i]))
    lost = _energy(_wide(trip.y[i]) - _wide(x[i]))
    slack = _energy(_rounding(codec, x[i], trip.y[i])) + 1e-5 * whole
    if laws.contraction and not codec.needs_key:
      allowed = _allowed_energy(codec, x[i])
      if not lost <= allowed + slack + 2 * (allowed * slack) ** 0.5:
        detail = f"{lost} of {whole} is lost, {allowed} allowed"
        yield Breach("contraction", i, detail)
    if laws.projects and x.dtype == np.float32:
      kept = _energy(_wide(np.asarray(trip.payload.values)[i]))
      if not abs(kept + lost - whole) <= slack:
        detail = f"{kept} is kept and {lost} lost of {whole}"
        yield Breach("projects", i, detail)


def _allowed_energy(codec: codecs.Codec, a: np.ndarray) -> float:
  laws = codec.laws
  floor = laws.error.floor if laws.error else 0.0
  return (1 - laws.contraction) * _energy(_wide(a)) + a.size * floor**2


def _find_in_sums(sample: _Sample) -> Iterator[Breach]:
  """Checks that payloads may be added before they are decoded."""
  codec, x, usable, trip, _ = sample

  def add_next(leaf: Array) -> Array:
    a = np.asarray(leaf)
    if not jnp.issubdtype(a.dtype, jnp.floating):
      return jnp.asarray(a)
    with np.errstate(all="ignore"):
      return jnp.asarray(a + np.roll(a, 1, 0))

  like = jax.ShapeDtypeStruct(x.shape[1:], x.dtype)
  _, decode = _programs(codec, like)
  sums = _wide(np.asarray(decode(jax.tree.map(add_next, trip.payload))))
  y = _wide(trip.y)
  eps = max(2.0**-16, 8 * float(jnp.finfo(x.dtype).eps))
  for i in usable:
    before = (i - 1) % len(x)
    if before not in usable or max(_peak(x[i]), _peak(x[before])) > 1e30:
      continue
    if x.dtype == np.float16 and max(_peak(y[i]), _peak(y[before])) > 3e4:
      continue
    most = max(_peak(y[i]), _peak(y[before])) * x[i].size ** 0.5
    off = np.abs(sums[i] - (y[i] + y[before])).max()
    if not off <= eps * most + 1e-37:
      yield Breach("summable", i, f"the sum decodes to something {off} away")


def _find_in_memory(sample: _Sample) -> Iterator[Breach]:
  """Simulates error feedback, and checks that its memory stays bounded."""
  codec, x, usable, _, run = sample
  if x.dtype != np.float32 or not _fills_soon(codec):
    return
  # The memory may grow beyond the values, and must not overflow.
  most_used = min(1e20, codec.laws.largest / 64)
  chosen = [i for i in usable if 1e-20 < _peak(x[i]) <= most_used]
  if not chosen:
    return
  rng = np.random.default_rng(0)
  memory = np.zeros_like(x)
  fits = np.ones(len(x), bool)
  # Peaks of the memory in the first and in the second half of the steps.
  most = np.zeros((2, len(x)))
  for step in range(_STEPS):
    given = np.zeros_like(x)
    given[chosen] = x[chosen]
    # Some arrays stay, some change, and some push where the memory is.
    for i in chosen[1::3]:
      given[i] = rng.permutation(x[i].reshape(-1)).reshape(x[i].shape)
    for i in chosen[2::3]:
      given[i] = np.copysign(x[i], memory[i])
    value = given + memory
    out = run(jnp.asarray(value), step)
    memory = value - out.y
    fits &= out.dropped == 0
    half = most[2 * step // _STEPS]
    for i in chosen:
      half[i] = max(half[i], _peak(memory[i]))
  floor = codec.laws.error.floor if codec.laws.error else 0.0
  # How many times its peak an array may add to the memory by chance.
  late = 2.0
  if codec.needs_key and codec.laws.contraction:
    # An element waits for its draw, which may come late by chance.
    late += 8 / codec.laws.contraction
  for i in chosen:
    # Growth at every step doubles the peak from one half to the next, or more.
    allowed = 1.7 * most[0, i] + 2 * floor + late * _peak(x[i])
    if fits[i] and not most[1, i] <= allowed:
      detail = f"the memory grows from {most[0, i]} to {most[1, i]}"
      yield Breach("bounds_memory", i, detail)


def _fills_soon(codec: codecs.Codec) -> bool:
  """Returns whether the simulation has enough steps to fill the memory."""
  laws = codec.laws
  if laws.error and laws.error.relative + laws.error.peak < 1:
    return True
  # A memory without any bound has no contraction to wait for either.
  return not 0 < laws.contraction < (0.1 if codec.needs_key else 1 / 64)


def _find_in_means(sample: _Sample) -> Iterator[Breach]:
  """Checks laws that hold in expectation, on two rows."""
  codec, x, usable, _, run = sample
  laws = codec.laws
  if not (laws.unbiased or laws.contraction):
    return
  inside = [i for i in usable if 1e-20 < _peak(x[i]) < 1e20]
  if not inside or x.dtype != np.float32:
    return
  spread = [_energy(_wide(row)) / _peak(row) ** 2 for row in x[inside]]
  seeds = np.arange(-(-_SAMPLES // len(x)) * len(x)).reshape(-1, len(x))
  # The first row, and that of fewest large elements.
  for i in sorted({inside[0], inside[int(np.argmin(spread))]}):
    same = jnp.asarray(np.broadcast_to(x[i], x.shape))
    trips = [run(same, row) for row in seeds]
    if any(one.dropped.any() for one in trips):
      continue  # Other keys choose other elements, not all with a slot.
    drawn = np.concatenate([_wide(one.y) for one in trips])
    exact = _wide(x[i])
    if laws.unbiased:
      excess = excess_bias(drawn, exact, _SIGMAS)
      # Scales are rounded to 16 significant bits.
      if not excess <= 2.0**-15 * _peak(x[i]):
        yield Breach("unbiased", i, f"biased by {excess}")
    if laws.contraction:
      lost = np.array([_energy(y - exact) for y in drawn])
      allowed = np.array(_allowed_energy(codec, x[i]))
      excess = excess_bias(lost, allowed, _SIGMAS)
      if lost.mean() > allowed and excess > 1e-5 * _energy(exact):
        detail = f"{lost.mean()} is lost, {allowed} allowed"
        yield Breach("contraction", i, detail)


def excess_bias(drawn: np.ndarray, exact: np.ndarray, sigmas: float) -> float:
  """Returns by how much a mean is off beyond so many standard errors."""
  error = np.abs(drawn.mean(0) - exact)
  spread = drawn.std(0) / np.sqrt(len(drawn))
  # drawn: (samples, elements).
  # Bernstein's second term: an element that almost never rounds the other way
  # may not do so in any sample, and then shows no spread at all. Its factor,
  # sigmas ** 2 / 6, is less than 2 * sigmas up to 12 standard errors.
  rare = np.max(np.abs(drawn - exact), initial=0) * 2 * sigmas / len(drawn)
  return float(np.max(error - sigmas * spread - rare, initial=-np.inf))


def _same_bits(a: np.ndarray, b: np.ndarray) -> bool:
  return a.tobytes() == b.tobytes()


def _count(a: np.ndarray, b: np.ndarray) -> int:
  word = np.dtype(f"u{a.itemsize}")
  return int((a.view(word) != b.view(word)).sum()) if a.ndim else 1


def _peak(a: np.ndarray) -> float:
  return float(np.max(np.abs(_wide(a)), initial=0))


def _wide(a: Any) -> np.ndarray:
  return np.asarray(a).astype(np.float64)


def _energy(a: np.ndarray) -> float:
  return float((a**2).sum())


def require(holds: bool, message: str) -> None:
  """Raises an AssertionError unless a property holds."""
  if not holds:
    raise AssertionError(message)
