"""Every implementation of an op against its reference, bit for bit."""

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from experiments.kernels.ops import Op
from jaxmotion.core import Array, PyTree, ShapedLike

# Values of fresh arrays: numbers that no tile divides.
_ODD = (997, 100_003)
_SPECIAL = (0.0, -0.0, np.inf, -np.inf, np.nan, 1e-42, 3e38)
_POISON = 0xA5


class Outcome(NamedTuple):
  """How an implementation did on one array.

  Attributes:
    op: name of the op.
    implementation: of it.
    case: name of the array.
    values: outputs that were compared.
    wrong: how many of them differ; None if the implementation does not take
      such arguments.
    reason: why it does not.
  """

  op: str
  implementation: str
  case: str
  values: int
  wrong: int | None
  reason: str


def check(
  op: Op, implementations: Sequence[str], seed: int, every_case: bool
) -> Iterator[Outcome]:
  """Compares what implementations make with what the reference does.

  They run on the default device, jitted, their outputs in memory that held
  something else. The reference runs on the host, and where that is the default
  device an operation at a time, so that it is not the same program.

  Args:
    op: the op.
    implementations: their names.
    seed: of fresh arrays.
    every_case: whether to check the op's own arrays too.
  """
  host = jax.devices("cpu")[0]
  alone = host in jax.devices()
  for case, make in {
    **(op.cases if every_case else {}),
    **_fresh(seed),
  }.items():
    x = make()
    like = jax.ShapeDtypeStruct(x.shape, x.dtype)
    run = functools.partial(op.run, like, implementation="reference")
    with jax.default_device(host):
      args = (op.make if alone else jax.jit(op.make))(jnp.asarray(x))
      expected = (run if alone else jax.jit(run))(*args)
    args = jax.device_put(args, jax.devices()[0])
    for name in implementations:
      try:
        got = _poisoned(op, like, args, name)
      except NotImplementedError as reason:
        yield Outcome(op.name, name, case, 0, None, str(reason))
        continue
      with jax.default_device(host):
        views = [
          jax.tree.leaves(op.view(like, *jax.device_put((args, a), host)))
          for a in (expected, got)
        ]
      values, wrong = _differing(op, *views)
      yield Outcome(op.name, name, case, values, wrong, "")


def _fresh(seed: int) -> dict[str, Callable[[], np.ndarray]]:
  rng = np.random.default_rng(seed)
  fresh: dict[str, Callable[[], np.ndarray]] = {}
  for size in _ODD:
    x = rng.standard_normal(size, dtype=np.float32)
    x[rng.integers(0, size, len(_SPECIAL))] = _SPECIAL
    fresh[f"fresh{size}"] = functools.partial(np.copy, x)
  return fresh


def _poisoned(
  op: Op, like: ShapedLike, args: tuple[PyTree, ...], implementation: str
) -> PyTree:
  """Outputs in memory where something else was."""
  run = lambda _, *args: op.run(like, *args, implementation=implementation)
  poison = jax.tree.map(_poison, op.shapes(like)[1])
  return jax.jit(run, donate_argnums=0, keep_unused=True)(poison, *args)


def _poison(a: ShapedLike) -> Array:
  dtype = np.dtype(a.dtype)
  pattern = np.full(dtype.itemsize, _POISON, np.uint8).view(dtype)
  return jnp.full(a.shape, jnp.asarray(pattern[0]))


def _differing(
  op: Op, expected: Sequence[Array], got: Sequence[Array]
) -> tuple[int, int]:
  """Values compared, and how many differ."""
  values = wrong = 0
  for a, b in zip(map(np.asarray, expected), map(np.asarray, got), strict=True):
    if a.shape != b.shape or a.dtype != b.dtype:
      raise ValueError(
        f"{op.name} makes {b.dtype}{b.shape}, its reference {a.dtype}{a.shape}."
      )
    values += a.size
    wrong += int(np.count_nonzero(_differ(a, b, op.tolerance)))
  return values, wrong


def _differ(a: np.ndarray, b: np.ndarray, tolerance: float) -> np.ndarray:
  # All NaN are one: which of them comes out depends on the device.
  if not jnp.issubdtype(a.dtype, jnp.floating):
    return a != b
  a, b = a.astype(np.float64), b.astype(np.float64)
  same = (a == b) & (np.signbit(a) == np.signbit(b)) | (
    np.isnan(a) & np.isnan(b)
  )
  if tolerance:
    with np.errstate(invalid="ignore"):
      same |= np.abs(a - b) <= tolerance * np.abs(a)
  return ~same
