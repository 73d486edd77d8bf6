"""Which implementation of an op runs.

Each op has a room; there the reference and every other implementation are a
file of their own, with a function of the op's name. The reference is plain
`jax.numpy` and runs everywhere.
"""

import functools
import importlib
import os
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax import lax

from jaxmotion.core import PyTree, check_choice

IMPLEMENTATIONS = ("reference", "pallas_triton")
VARIABLE = "JAXMOTION_KERNELS"


def run(
  room: str,
  op: str,
  /,
  *args: PyTree,
  gpu: Sequence[str] = (),
  implementation: str | None = None,
  **static: Any,
) -> PyTree:
  """Runs an op by one of its implementations.

  An implementation that cannot take these arguments raises NotImplementedError
  and the next one is tried: first what JAXMOTION_KERNELS names, read when the
  op is traced; then, where arrays are on an NVIDIA GPU, those of `gpu`; then
  the reference.

  Args:
    room: the op's folder.
    op: name of the function.
    *args: pytrees of arrays.
    gpu: implementations that are preferred on a GPU.
    implementation: the only one to try, whatever else says.
    **static: configuration, not arrays.

  Raises:
    ValueError: no implementation has that name.
    NotImplementedError: none can take the arguments; the message has the
      reasons of all.
  """
  if implementation is not None:
    check_choice("implementation", implementation, IMPLEMENTATIONS)
    return _first(room, op, [implementation], static)(*args)
  forced = os.environ.get(VARIABLE)
  if forced:
    check_choice(VARIABLE, forced, IMPLEMENTATIONS)
    return _first(room, op, [forced, "reference"], static)(*args)
  reference = _first(room, op, ["reference"], static)
  if not gpu or not (_gpu_is_here() or _gpu_is_meant()):
    return reference(*args)
  preferred = _first(room, op, [*gpu, "reference"], static)
  return lax.platform_dependent(*args, cuda=preferred, default=reference)


def _first(
  room: str, op: str, names: Sequence[str], static: dict[str, Any]
) -> Callable[..., PyTree]:
  """A function that tries implementations in turn."""

  def call(*args: PyTree) -> PyTree:
    failures = []
    for name in names:
      try:
        return _load(room, op, name)(*args, **static)
      except NotImplementedError as failure:
        failures.append(f"{name}: {failure}")
    raise NotImplementedError(
      f"{op} has no implementation for these arguments: {'; '.join(failures)}"
    )

  return call


def _load(room: str, op: str, name: str) -> Callable[..., PyTree]:
  # Here and not on top: Pallas need not be imported where it cannot run.
  module = importlib.import_module(f"jaxmotion.kernels.{room}._{name}")
  if not hasattr(module, op):
    raise NotImplementedError("there is none of this op")
  return getattr(module, op)


def _gpu_is_meant() -> bool:
  """Says whether the program is compiled for a GPU that is not there."""
  device = jax.sharding.get_abstract_mesh().abstract_device
  return device is not None and device.platform == "gpu"


@functools.cache
def _gpu_is_here() -> bool:
  """Says whether any array of this process can be on a GPU.

  If none can, there is nothing to choose, and the programs of hosts stay as
  small as they are.
  """
  try:
    return bool(jax.devices("cuda"))
  except RuntimeError:
    return False
