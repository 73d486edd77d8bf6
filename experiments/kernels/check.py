"""Checks of each implementation of an op against its reference, bit for bit."""

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from experiments.kernels import ops
from jaxmotion.core import Array, PyTree, ShapedLike

# Numbers of elements of fresh arrays: no tile divides them.
_ODD = (997, 100_003)
_SPECIAL = (0.0, -0.0, np.inf, -np.inf, np.nan, 1e-42, 3e38)
_POISON = 0xA5
# XLA:CPU flushes results of additions that are smaller, and a GPU does not.
_LEAST_NORMAL = 2.0**-126


class Outcome(NamedTuple):
  """Outputs of one implementation, compared on one array."""

  op: str  # Name of the op.
  implementation: str  # Name of the implementation.
  case: str  # Name of the array.
  values: int  # Number of output elements that were compared.
  # Number of them that differ; None if the implementation does not take such
  # arguments.
  wrong: int | None
  reason: str  # Why it does not take them.


def check_op(
  op: ops.Op, implementations: Sequence[str], seed: int, every_case: bool
) -> Iterator[Outcome]:
  """Compares the outputs of implementations with those of the reference."""
  # Implementations run on the default device, jitted, and write to memory that
  # held something else. The reference runs on the host. If the host is the
  # default device, the reference runs op by op, so that it is not the same
  # program.
  host = jax.devices("cpu")[0]
  is_default = host in jax.devices()
  for case, make in {
    **(op.cases if every_case else {}),
    **_make_fresh(seed),
  }.items():
    x = make()
    like = jax.ShapeDtypeStruct(x.shape, x.dtype)
    run = functools.partial(op.run, like, implementation="reference")
    with jax.default_device(host):
      args = (op.make if is_default else jax.jit(op.make))(jnp.asarray(x))
      expected = (run if is_default else jax.jit(run))(*args)
    args = jax.device_put(args, jax.devices()[0])
    for name in implementations:
      try:
        got = _run_poisoned(op, like, args, name)
      except NotImplementedError as reason:
        yield Outcome(op.name, name, case, 0, None, str(reason))
        continue
      with jax.default_device(host):
        views = [
          jax.tree.leaves(op.view(like, *jax.device_put((args, a), host)))
          for a in (expected, got)
        ]
      values, wrong = _count_wrong(op, *views)
      yield Outcome(op.name, name, case, values, wrong, "")


def _make_fresh(seed: int) -> dict[str, Callable[[], np.ndarray]]:
  rng = np.random.default_rng(seed)
  fresh: dict[str, Callable[[], np.ndarray]] = {}
  for size in _ODD:
    x = rng.standard_normal(size, dtype=np.float32)
    x[rng.integers(0, size, len(_SPECIAL))] = _SPECIAL
    fresh[f"fresh{size}"] = functools.partial(np.copy, x)
  return fresh


def _run_poisoned(
  op: ops.Op, like: ShapedLike, args: tuple[PyTree, ...], implementation: str
) -> PyTree:
  """Returns outputs written to memory that held something else."""
  run = lambda _, *args: op.run(like, *args, implementation=implementation)
  poison = jax.tree.map(_make_poison, op.shapes(like)[1])
  return jax.jit(run, donate_argnums=0, keep_unused=True)(poison, *args)


def _make_poison(a: ShapedLike) -> Array:
  dtype = np.dtype(a.dtype)
  pattern = np.full(dtype.itemsize, _POISON, np.uint8).view(dtype)
  return jnp.full(a.shape, jnp.asarray(pattern[0]))


def _count_wrong(
  op: ops.Op, expected: Sequence[Array], got: Sequence[Array]
) -> tuple[int, int]:
  """Returns the numbers of compared and of different elements."""
  values = wrong = 0
  for a, b in zip(map(np.asarray, expected), map(np.asarray, got), strict=True):
    if a.shape != b.shape or a.dtype != b.dtype:
      raise ValueError(
        f"{op.name} makes {b.dtype}{b.shape}, its reference {a.dtype}{a.shape}."
      )
    values += a.size
    wrong += int(np.count_nonzero(_find_different(a, b, op.tolerance)))
  return values, wrong


def _find_different(
  a: np.ndarray, b: np.ndarray, tolerance: float
) -> np.ndarray:
  """Returns where two arrays differ beyond a relative tolerance."""
  # The bits of a NaN depend on the device: all NaN are equal here.
  if not jnp.issubdtype(a.dtype, jnp.floating):
    return a != b
  a, b = (
    np.where(np.abs(x) < _LEAST_NORMAL, np.copysign(0.0, x), x)
    for x in (a.astype(np.float64), b.astype(np.float64))
  )
  same = (a == b) & (np.signbit(a) == np.signbit(b)) | (
    np.isnan(a) & np.isnan(b)
  )
  if tolerance:
    with np.errstate(invalid="ignore"):
      same |= np.abs(a - b) <= tolerance * np.abs(a)
  return ~same
