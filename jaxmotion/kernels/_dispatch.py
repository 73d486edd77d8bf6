"""Chooses the implementation of an op.

Each op has a folder. In it the reference and every other implementation have a
file of their own, and `_api.py` lists them by name for `dispatch`. The
reference is plain `jax.numpy` and runs everywhere.
"""

import functools
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jax import lax

from jaxmotion import core
from jaxmotion.core import PyTree

IMPLEMENTATIONS = (
  "reference",
  "pallas_triton",
  "pallas_mosaic",
  "pallas_tpu",
)
VARIABLE = "JAXMOTION_KERNELS"


def dispatch(
  implementations: Mapping[str, Callable[..., PyTree]],
  *args: PyTree,
  gpu: Sequence[str] = (),
  implementation: str | None = None,
  **static: Any,
) -> PyTree:
  """Runs an op by one of its implementations."""
  # An implementation that cannot take the arguments raises NotImplementedError,
  # and the next one is tried. First comes the implementation that
  # JAXMOTION_KERNELS names, read when the op is traced. Where arrays are on an
  # NVIDIA GPU, those of `gpu` come next. The reference is last.
  forced = os.environ.get(VARIABLE)
  if implementation is not None:
    core.check_choice("implementation", implementation, IMPLEMENTATIONS)
    names = [implementation]
  elif forced:
    core.check_choice(VARIABLE, forced, IMPLEMENTATIONS)
    names = [forced, "reference"]
  elif gpu and core.list_platforms() == {"cuda"}:
    # Traced alone: to trace an encoder takes 10 ms, for each type of array.
    names = [*gpu, "reference"]
  elif gpu and "cuda" in core.list_platforms():
    preferred = functools.partial(
      _try_in_order, implementations, [*gpu, "reference"], static
    )
    reference = functools.partial(implementations["reference"], **static)
    return lax.platform_dependent(*args, cuda=preferred, default=reference)
  else:
    return implementations["reference"](*args, **static)
  return _try_in_order(implementations, names, static, *args)


def _try_in_order(
  implementations: Mapping[str, Callable[..., PyTree]],
  names: Sequence[str],
  static: dict[str, Any],
  *args: PyTree,
) -> PyTree:
  """Runs the first implementation that takes its arguments."""
  failures = []
  for name in names:
    if name not in implementations:
      failures.append(f"{name}: there is none of this op")
      continue
    try:
      return implementations[name](*args, **static)
    except NotImplementedError as failure:
      failures.append(f"{name}: {failure}")
  raise NotImplementedError(
    f"{implementations['reference'].__name__} has no implementation for these "
    f"arguments: {'; '.join(failures)}"
  )
