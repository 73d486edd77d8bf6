"""Chooses the implementation of an op.

Each op has a folder. In it the reference and every other implementation have a
file of their own, and a table of the folder names them for `dispatch`. The
reference is plain `jax.numpy` and runs everywhere.
"""

import functools
import os
from collections.abc import Mapping, Sequence
from typing import Any

from jax import lax

from jaxmotion import core
from jaxmotion.core import PyTree

IMPLEMENTATIONS = ("reference", "pallas_triton")
VARIABLE = "JAXMOTION_KERNELS"
INTERPRETS_KERNELS = False
"""Whether kernels run as `jax.numpy`: tests set it, where there is no GPU."""

# What is tried for arrays on an NVIDIA GPU.
_ON_GPU = ("pallas_triton", "reference")


@core.declare(implementation=core.optional(core.choice(IMPLEMENTATIONS)))
def dispatch(
  table: Mapping[str, Any],
  name: str,
  /,
  *args: PyTree,
  implementation: str | None = None,
  **static: Any,
) -> PyTree:
  """Runs an op by the first implementation that takes its arguments."""
  # An implementation that cannot take the arguments raises NotImplementedError,
  # and the next one is tried. First comes the implementation that
  # JAXMOTION_KERNELS names, read when the op is traced. Where arrays are on an
  # NVIDIA GPU, the kernel comes next. The reference is last.
  forced = os.environ.get(VARIABLE)
  run = functools.partial(_try_in_order, table, name, static)
  if implementation is not None:
    return run([implementation], *args)
  if forced:
    core.choice(IMPLEMENTATIONS)(VARIABLE, forced)
    return run([forced, "reference"], *args)
  platforms = core.list_platforms()
  if platforms == {"cuda"}:
    # Traced alone: to trace an encoder takes 10 ms, for each type of array.
    return run(_ON_GPU, *args)
  reference = functools.partial(getattr(table["reference"], name), **static)
  if "cuda" not in platforms:
    return reference(*args)
  preferred = functools.partial(run, _ON_GPU)
  return lax.platform_dependent(*args, cuda=preferred, default=reference)


def _try_in_order(
  table: Mapping[str, Any],
  name: str,
  static: Mapping[str, Any],
  implementations: Sequence[str],
  *args: PyTree,
) -> PyTree:
  """Runs the first implementation that takes its arguments."""
  failures = []
  for implementation in implementations:
    run = getattr(table.get(implementation), name, None)
    if run is None:
      failures.append(f"{implementation}: there is none of this op")
      continue
    try:
      return run(*args, **static)
    except NotImplementedError as failure:
      failures.append(f"{implementation}: {failure}")
  raise NotImplementedError(
    f"{name} has no implementation for these arguments: {'; '.join(failures)}"
  )
