"""Chooses the implementation of an op.

Each op has a folder. In it the reference and every other implementation have a
file of their own, and `_api.py` lists them by name for `dispatch`. The
reference is plain `jax.numpy` and runs everywhere.
"""

import functools
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
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
  elif gpu and _targets_nvidia():
    # Traced alone: to trace an encoder takes 10 ms, for each type of array.
    names = [*gpu, "reference"]
  elif gpu and _has_gpu():
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


def _targets_nvidia() -> bool:
  """Says whether the mesh in use is of NVIDIA GPUs, which may be absent."""
  device = jax.sharding.get_abstract_mesh().abstract_device
  return (
    device is not None
    and device.platform == "gpu"
    and device.device_kind.startswith("NVIDIA")
  )


@functools.cache
def _has_gpu() -> bool:
  """Says whether any array of this process can be on a GPU."""
  # If none can, there is nothing to choose: `dispatch` then skips
  # `lax.platform_dependent`, which keeps the programs of hosts small.
  try:
    return bool(jax.devices("cuda"))
  except RuntimeError:
    return False
