"""Results of generated programs, beside those of plain JAX."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from experiments.fuzz import program_nodes
from jaxmotion import core
from jaxmotion.core import PyTree

# Code that runs for milliseconds is not worth seconds of optimization.
_OPTIONS: Any = {"xla_backend_optimization_level": 0}


class Comparison(NamedTuple):
  """Results of a function of plain JAX and of ours.

  Attributes:
    law: what must be equal.
    case: the program and the options.
    expected: tree of the plain function.
    found: tree of ours.
    tolerance: largest relative distance of a leaf; None asks only for finite
      floats.
  """

  law: str
  case: str
  expected: PyTree
  found: PyTree
  tolerance: float | None


def describe_difference(comparison: Comparison) -> str:
  """Returns where two trees differ, or nothing."""
  _, _, expected, found, tolerance = comparison
  if not core.same_structure(expected, found):
    return f"{jax.tree.structure(found)}, not {jax.tree.structure(expected)}"
  lines = []
  for (path, a), b in zip(
    jax.tree.leaves_with_path(expected), jax.tree.leaves(found), strict=True
  ):
    if problem := _compare_leaves(a, b, tolerance):
      lines.append(f"{jax.tree_util.keystr(path)}: {problem}")
  return "\n".join(lines)


def _compare_leaves(a: Any, b: Any, tolerance: float | None) -> str:
  a, b = jnp.asarray(a), jnp.asarray(b)
  if (a.shape, a.dtype) != (b.shape, b.dtype):
    return f"{b.dtype}{b.shape}, not {a.dtype}{a.shape}"
  if not jnp.issubdtype(a.dtype, jnp.floating):
    share = float(np.mean(np.asarray(a) != np.asarray(b)))
    # An argmax may differ where two elements are equal but for rounding.
    return f"{share:.3g} of the integers differ" if share > 0.05 else ""
  x, y = (np.asarray(v, np.float64).ravel() for v in (a, b))
  if not np.isfinite(x).all():
    return ""
  if not np.isfinite(y).all():
    return f"{np.sum(~np.isfinite(y))} elements are not finite"
  scale = np.linalg.norm(x)
  distance = np.linalg.norm(x - y) / scale if scale > 1e-20 else 0.0
  if tolerance is not None and distance > tolerance:
    return f"relative distance {distance:.3g}, at most {tolerance:g} allowed"
  return ""


def compile_lightly(fn: Callable[..., Any]) -> Callable[..., Any]:
  """Returns a jitted function that is compiled fast."""
  return jax.jit(fn, compiler_options=_OPTIONS)


def rounding_tolerance(nodes: Sequence[program_nodes.Node]) -> float:
  """Returns the relative distance that rounding in another order explains."""
  return 0.2 if any(n.is_narrow() for n in nodes) else 2e-4
