"""Compiles a function for a GPU and reads memory, kernels and assembly."""

import functools
import importlib.metadata
import pathlib
import re
import tempfile
from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jaxlib
from jax.experimental import topologies
from jax.sharding import AbstractDevice, AbstractMesh, SingleDeviceSharding

from experiments.gpu_compile import hlo, ptx
from jaxmotion import core
from jaxmotion.core import PyTree

_PLUGINS = ("jax-cuda12-plugin", "jax-cuda13-plugin")
# Launches in XLA's dump: the number, the kernel, and its shared memory.
_LAUNCH = re.compile(
  r"^\s*(\d+): kCustomKernel .*\] +(\S+) +grid: .* shared_memory: (\d+) bytes",
  re.MULTILINE,
)
# The instruction that a launch belongs to, and the number of the launch.
_SOURCE = re.compile(r'profile_annotation: "([^"]*)"\s*thunk_id: (\d+)')


class Compiled(NamedTuple):
  """A program for a GPU: compiled, not run."""

  # The GPU. The compiler spends the memory that it is told of, so two figures
  # compare only if `gpu.memory_gib` is the same.
  gpu: ptx.Gpu
  # Bytes of the program's buffers, as `memory_analysis` states them.
  memory: Any
  kernels: list[hlo.Kernel]  # Instructions that run on the device, in order.
  # Assembly of each launch of a generated kernel, in order.
  assembly: list[ptx.Assembly]

  @property
  def launches(self) -> int | None:
    """Number of kernels that a call launches; None if unknown."""
    counts = [
      None if k.runs is None else k.runs * k.launches for k in self.kernels
    ]
    return _sum_known(counts)

  @property
  def traffic_bytes(self) -> int | None:
    """Bytes that all kernels of a call read and write; None if unknown."""
    return _sum_known([k.traffic_bytes for k in self.kernels])


def _sum_known(counts: list[int | None]) -> int | None:
  """Returns the sum, or None if one of the counts is unknown."""
  known = [n for n in counts if n is not None]
  return sum(known) if len(known) == len(counts) else None


def stay_on_host() -> None:
  """Tells JAX, before it starts, that it will find no GPU."""
  jax.config.update("jax_platforms", "cpu")


def explain_refusal() -> str | None:
  """Returns the reason why no GPU can be compiled for; None if one can."""
  found = {}
  for name in _PLUGINS:
    try:
      found[name] = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
      continue
  if not found:
    return "the extra `cuda-compile` is not installed"
  for name, version in found.items():
    if version != jaxlib.__version__:
      return f"{name} {version} is not made for jaxlib {jaxlib.__version__}"
  try:
    find_devices(ptx.GPUS["H100"])
  except NotImplementedError:
    return "JAX started without JAX_PLATFORMS=cpu and found no GPU"
  return None


def find_gpu(name: str = "H100", memory_gib: float | None = None) -> ptx.Gpu:
  """Returns the description of a GPU.

  >>> find_gpu("H200").memory_gib, find_gpu("H200", 12).memory_gib
  (141, 12)
  """
  core.choice(tuple(ptx.GPUS))("gpu", name)
  gpu = ptx.GPUS[name]
  if memory_gib is None:
    return gpu
  if not memory_gib > 0:
    raise ValueError(f"`memory_gib` must be positive, got {memory_gib!r}.")
  return gpu._replace(memory_gib=memory_gib)


def compile_for(
  fn: Callable[..., PyTree],
  *args: PyTree,
  gpu: str = "H100",
  memory_gib: float | None = None,
  **jit_options: Any,
) -> Compiled:
  """Compiles a function for a GPU that is not there."""
  # Nothing is autotuned, since that takes the GPU: matmuls and convolutions are
  # the compiler's first guess, without the workspace that cuDNN would ask for,
  # and large sorts are XLA's own instead of CUB's. Memory kinds of arguments
  # are dropped.
  target = find_gpu(gpu, memory_gib)
  return compile_lowered(_lower_program(fn, args, target, jit_options), target)


def compile_lowered(lowered: Any, gpu: ptx.Gpu) -> Compiled:
  """Compiles what `lower_for` returned, and reads the program."""
  with tempfile.TemporaryDirectory() as folder:
    options = {"xla_dump_to": folder, "xla_dump_emitter_re": "ptx"}
    program = lowered.compile(compiler_options=options)
    return _read_program(program, pathlib.Path(folder), gpu)


def compile_memory(
  fn: Callable[..., PyTree],
  *args: PyTree,
  gpu: str = "H100",
  memory_gib: float | None = None,
  **jit_options: Any,
) -> Any:
  """Compiles a function for its memory alone, in a third of the time."""
  lowered = _lower_program(fn, args, find_gpu(gpu, memory_gib), jit_options)
  return lowered.compile().memory_analysis()


def check_compiler() -> None:
  """Raises a RuntimeError if no GPU can be compiled for."""
  if why := explain_refusal():
    raise RuntimeError(f"Nothing can be compiled for a GPU: {why}.")


def trace_for(
  fn: Callable[..., PyTree], *args: PyTree, gpu: ptx.Gpu, **jit_options: Any
) -> Any:
  """Traces a function at arguments on a GPU that is not there."""
  check_compiler()
  (device,) = find_devices(gpu)
  sharding = SingleDeviceSharding(device)
  args = jax.tree.map(
    lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=sharding), args
  )
  with jax.sharding.use_abstract_mesh(_make_mesh(gpu.kind)):
    return jax.jit(fn, **jit_options).trace(*args)


def lower_for(traced: Any, gpu: ptx.Gpu) -> Any:
  """Lowers a traced function for a GPU that is not there."""
  with jax.sharding.use_abstract_mesh(_make_mesh(gpu.kind)):
    return traced.lower(lowering_platforms=("cuda",))


def _lower_program(
  fn: Callable[..., PyTree],
  args: PyTree,
  gpu: ptx.Gpu,
  jit_options: dict[str, Any],
) -> Any:
  return lower_for(trace_for(fn, *args, gpu=gpu, **jit_options), gpu)


@functools.cache
def find_devices(gpu: ptx.Gpu, count: int = 1) -> tuple[Any, ...]:
  """Returns devices of a host that has so many GPUs, none of them there."""
  topology = topologies.get_topology_desc(
    platform="cuda",
    target_config=ptx.describe_target(gpu),
    topology=f"1x1x{count}",
  )
  return tuple(topology.devices)


def _make_mesh(kind: str) -> AbstractMesh:
  """Returns the mesh that tells Pallas which GPU its kernels are for."""
  device = AbstractDevice(device_kind=kind, num_cores=None, platform="gpu")
  return AbstractMesh((1,), ("gpu",), abstract_device=device)


def _read_program(program: Any, folder: pathlib.Path, gpu: ptx.Gpu) -> Compiled:
  """Reads a compiled program and the compiler's dump in the folder."""
  sources = _SOURCE.findall(_read_dump(folder, "thunk_metadata"))
  source = {number: instruction for instruction, number in sources}
  launched = [
    (name, source[str(int(number))], int(shared))
    for number, name, shared in _LAUNCH.findall(
      _read_dump(folder, "thunk_sequence")
    )
  ]
  counts = Counter(instruction for _, instruction, _ in launched)
  text = program.as_text()
  files = {ptx.kernel_name(path): path for path in folder.glob("*.ptx")}
  return Compiled(
    gpu,
    program.memory_analysis(),
    hlo.list_kernels(text, counts),
    [
      ptx.read_assembly(files[name], instruction, shared)
      for name, instruction, shared in launched
      if name in files
    ],
  )


def _read_dump(folder: pathlib.Path, name: str) -> str:
  (path,) = folder.glob(f"*.{name}.txt")
  return path.read_text()
