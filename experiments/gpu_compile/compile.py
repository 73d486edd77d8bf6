"""Compiles a function for a GPU that is not there."""

import dataclasses
import functools
import importlib.metadata
import pathlib
import re
import tempfile
from collections import Counter
from collections.abc import Callable
from typing import Any

import jax
import jaxlib
from jax.experimental import topologies
from jax.sharding import AbstractDevice, AbstractMesh, SingleDeviceSharding

from experiments.gpu_compile import hlo, ptx, targets
from jaxmotion.core import PyTree, check_choice
from jaxmotion.program import program_memory

_PLUGINS = ("jax-cuda12-plugin", "jax-cuda13-plugin")
# Launches: their number, the kernel, and the memory it shares.
_LAUNCH = re.compile(
  r"^\s*(\d+): kCustomKernel .*\] +(\S+) +grid: .* shared_memory: (\d+) bytes",
  re.MULTILINE,
)
# The instruction that a launch belongs to, and the launch's number.
_SOURCE = re.compile(r'profile_annotation: "([^"]*)"\s*thunk_id: (\d+)')


@dataclasses.dataclass(frozen=True)
class Memory:
  """What a program for a GPU needs: compiled, not run.

  Attributes:
    gpu: name of the device.
    memory_gib: memory that the compiler was told of; it spends what there is,
      so no figure means much without it.
    argument_bytes: of the arguments.
    output_bytes: of the results, those in donated arguments too.
    alias_bytes: of results in the memory of donated arguments.
    temp_bytes: of everything in between, on the device.
    host_temp_bytes: of everything in between, on the host.
  """

  gpu: str
  memory_gib: float
  argument_bytes: int
  output_bytes: int
  alias_bytes: int
  temp_bytes: int
  host_temp_bytes: int


@dataclasses.dataclass(frozen=True)
class Compiled(Memory):
  """A program for a GPU and what it needs: compiled, not run.

  Attributes:
    kernels: what runs on the device, in order.
    assembly: of each launch of a kernel that was generated, in order.
  """

  kernels: list[hlo.Kernel]
  assembly: list[ptx.Assembly]

  @property
  def launches(self) -> int | None:
    """Kernels launched in a call."""
    counts = [
      None if k.runs is None else k.runs * k.launches for k in self.kernels
    ]
    return _total(counts)

  @property
  def traffic_bytes(self) -> int | None:
    """Bytes that all kernels of a call read and write."""
    return _total([k.traffic_bytes for k in self.kernels])


def _total(counts: list[int | None]) -> int | None:
  known = [n for n in counts if n is not None]
  return sum(known) if len(known) == len(counts) else None


def stay_on_the_host() -> None:
  """Tells JAX, before it starts, that no GPU is to be found."""
  jax.config.update("jax_platforms", "cpu")


def refusal() -> str | None:
  """Says why nothing can be compiled for a GPU here; None if it can."""
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
    _device(targets.GPUS["H100"], 80)
  except NotImplementedError:
    return "JAX started without JAX_PLATFORMS=cpu and found no GPU"
  return None


@functools.cache
def _device(gpu: targets.Gpu, memory_gib: float) -> Any:
  topology = topologies.get_topology_desc(
    platform="cuda",
    target_config=targets.describe(gpu, memory_gib),
    topology="1x1x1",
  )
  return topology.devices[0]


def compile_for(
  fn: Callable[..., PyTree],
  *args: PyTree,
  gpu: str = "H100",
  memory_gib: float | None = None,
  **jit_options: Any,
) -> Compiled:
  """Compiles a function for a GPU that is not there.

  Nothing is tuned, since that would take the GPU: matrix products and
  convolutions are the compiler's first guess without the workspace that cuDNN
  would ask for, and large sorts are XLA's own instead of CUB's. Memory kinds of
  arguments are dropped.

  Args:
    fn: the function.
    *args: pytrees of arrays, or of their ShapeDtypeStructs.
    gpu: key of `GPUS`.
    memory_gib: memory it has, GiB; None for what that GPU comes with.
    **jit_options: of `jax.jit`.

  Returns:
    What the compiler made of it.

  Raises:
    ValueError: there is no such GPU.
    RuntimeError: nothing can be compiled here; see `refusal`.
  """
  target, memory_gib = _target(gpu, memory_gib)
  lowered = _lowered(fn, args, target, memory_gib, jit_options)
  with tempfile.TemporaryDirectory() as folder:
    options = {"xla_dump_to": folder, "xla_dump_emitter_re": "ptx"}
    program = lowered.compile(compiler_options=options)
    return _read(program, pathlib.Path(folder), target, memory_gib)


def memory_for(
  fn: Callable[..., PyTree],
  *args: PyTree,
  gpu: str = "H100",
  memory_gib: float | None = None,
  **jit_options: Any,
) -> Memory:
  """What `compile_for` says of memory, in a third of its time."""
  target, memory_gib = _target(gpu, memory_gib)
  program = _lowered(fn, args, target, memory_gib, jit_options).compile()
  return _memory(program, target, memory_gib)


def _target(gpu: str, memory_gib: float | None) -> tuple[targets.Gpu, float]:
  check_choice("gpu", gpu, tuple(targets.GPUS))
  target = targets.GPUS[gpu]
  memory_gib = target.memory_gib if memory_gib is None else memory_gib
  if not memory_gib > 0:
    raise ValueError(f"`memory_gib` must be positive, got {memory_gib!r}.")
  if why := refusal():
    raise RuntimeError(f"Nothing can be compiled for a GPU: {why}.")
  return target, memory_gib


def _lowered(
  fn: Callable[..., PyTree],
  args: PyTree,
  target: targets.Gpu,
  memory_gib: float,
  jit_options: dict[str, Any],
) -> Any:
  sharding = SingleDeviceSharding(_device(target, memory_gib))
  args = jax.tree.map(
    lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=sharding), args
  )
  with jax.sharding.use_abstract_mesh(_mesh(target.kind)):
    traced = jax.jit(fn, **jit_options).trace(*args)
    return traced.lower(lowering_platforms=("cuda",))


def _memory(program: Any, target: targets.Gpu, memory_gib: float) -> Memory:
  memory = program_memory(program)
  return Memory(
    target.kind,
    memory_gib,
    memory.argument_bytes,
    memory.output_bytes,
    memory.alias_bytes,
    memory.temp_bytes,
    memory.host_temp_bytes,
  )


def _mesh(kind: str) -> AbstractMesh:
  """What tells Pallas which GPU its kernels are for."""
  device = AbstractDevice(device_kind=kind, num_cores=None, platform="gpu")
  return AbstractMesh((1,), ("gpu",), abstract_device=device)


def _read(
  program: Any, folder: pathlib.Path, target: targets.Gpu, memory_gib: float
) -> Compiled:
  """Collects what the compiler says and what it left in the folder."""
  sources = _SOURCE.findall(_one(folder, "thunk_metadata"))
  source = {number: instruction for instruction, number in sources}
  launched = [
    (name, source[str(int(number))], int(shared))
    for number, name, shared in _LAUNCH.findall(_one(folder, "thunk_sequence"))
  ]
  counts = Counter(instruction for _, instruction, _ in launched)
  files = {ptx.kernel_of(path): path for path in folder.glob("*.ptx")}
  return Compiled(
    **vars(_memory(program, target, memory_gib)),
    kernels=hlo.kernels(program.as_text(), counts),
    assembly=[
      ptx.assembly(files[name], instruction, shared)
      for name, instruction, shared in launched
      if name in files
    ],
  )


def _one(folder: pathlib.Path, name: str) -> str:
  (path,) = folder.glob(f"*.{name}.txt")
  return path.read_text()
