"""Compiles programs for a TPU that is not there, without running them.

A TPU's compiler, libtpu, works on any machine; only its programs do not. It
needs the extra `tpu-compile`, and JAX must be told before it starts that it
will find no TPU: by `stay_on_host`.
"""

import functools
import importlib.util
import os
import threading
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
from jax.experimental import topologies
from jax.sharding import SingleDeviceSharding

from experiments.gpu_compile import hlo
from jaxmotion import core
from jaxmotion.core import PyTree


class Tpu(NamedTuple):
  """A kind of TPU, and a machine that has it.

  Attributes:
    kind: name of the device.
    topology: smallest machine of them that the compiler knows.
    accelerator: name of a machine with one host.
  """

  kind: str
  topology: str
  accelerator: str


TPUS = {
  "v5e": Tpu("TPU v5 lite", "v5e:2x2", "v5litepod-4"),
  "v6e": Tpu("TPU v6 lite", "v6e:2x2", "v6e-4"),
}


# libtpu cannot be started by two threads at once.
_STARTING = threading.Lock()


def stay_on_host(tpu: str) -> None:
  """Tells JAX and libtpu, before they start, that they will find no TPU."""
  jax.config.update("jax_platforms", "cpu")
  os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
  os.environ.setdefault("TPU_WORKER_HOSTNAMES", "localhost")
  os.environ.setdefault("TPU_ACCELERATOR_TYPE", TPUS[tpu].accelerator)


def explain_refusal() -> str | None:
  """Returns the reason why no TPU can be compiled for; None if one can."""
  if importlib.util.find_spec("libtpu") is None:
    return "the extra `tpu-compile` is not installed"
  return None


def compile_kernels(
  fn: Callable[..., PyTree],
  *args: PyTree,
  tpu: str = "v5e",
  **jit_options: Any,
) -> list[hlo.Kernel]:
  """Compiles a function and lists the instructions that the TPU runs."""
  core.check_choice("tpu", tpu, tuple(TPUS))
  if why := explain_refusal():
    raise RuntimeError(f"Nothing can be compiled for a TPU: {why}.")
  with _STARTING:
    sharding = SingleDeviceSharding(_find_device(tpu))
  shapes = jax.tree.map(
    lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=sharding), args
  )
  compiled = jax.jit(fn, **jit_options).lower(*shapes).compile()
  text = compiled.as_text()
  assert text is not None
  return hlo.list_kernels(text, {})


@functools.cache
def _find_device(tpu: str) -> Any:
  topology = topologies.get_topology_desc(
    platform="tpu", topology_name=TPUS[tpu].topology
  )
  return topology.devices[0]
