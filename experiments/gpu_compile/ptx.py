"""GPUs that programs are compiled for, and registers and spills of PTX."""

import functools
import importlib.util
import math
import os
import pathlib
import re
import shutil
import subprocess
from collections import Counter
from typing import NamedTuple


# References: NVIDIA H100 and H200 datasheets (memory, bandwidth); NVIDIA H100
# Tensor Core GPU Architecture (multiprocessors, L2); CUDA C++ Programming
# Guide, technical specifications of compute capability 9.0 (limits).
class Gpu(NamedTuple):
  """A GPU of compute capability 9.0: name, memory and bandwidth."""

  kind: str  # Name of the device.
  memory_gib: float  # Memory of the device, GiB.
  bandwidth: int  # Bandwidth of that memory, bytes per second.


GPUS = {
  "H100": Gpu("NVIDIA H100 80GB HBM3", 80, 3_350_000_000_000),
  "H200": Gpu("NVIDIA H200", 141, 4_800_000_000_000),
}

# Limits of a multiprocessor ("core") of compute capability 9.0.
THREADS_PER_CORE = 2048
BLOCKS_PER_CORE = 32
REGISTERS_PER_CORE = 65536
SHARED_BYTES_PER_CORE = 233472
# Shared memory that the system takes for each block.
SHARED_BYTES_RESERVED = 1024


def describe_target(gpu: Gpu) -> str:
  """Returns the text of a `GpuTargetConfigProto` of a GPU."""
  return f"""
gpu_device_info {{
  threads_per_block_limit: 1024
  threads_per_warp: 32
  shared_memory_per_block: 49152
  shared_memory_per_core: {SHARED_BYTES_PER_CORE}
  threads_per_core_limit: {THREADS_PER_CORE}
  core_count: 132
  fpus_per_core: 128
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  memory_bandwidth: {gpu.bandwidth}
  l2_cache_size: 52428800
  clock_rate_ghz: 1.98
  device_memory_size: {int(gpu.memory_gib * 2**30)}
  shared_memory_per_block_optin: 232448
  cuda_compute_capability {{ major: 9 }}
  registers_per_core_limit: {REGISTERS_PER_CORE}
  registers_per_block_limit: 65536
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 7 }}
runtime_version {{ major: 12 minor: 8 }}
device_description_str: "{gpu.kind}"
"""


_ENTRY = re.compile(r"^\.visible \.entry ([\w$]+)\(", re.MULTILINE)
_TARGET = re.compile(r"^\.target (\w+)", re.MULTILINE)
_THREADS = re.compile(r"^\.(?:reqntid|maxntid) ([\d, ]+)", re.MULTILINE)
_SHARED = re.compile(r"^\s*\.shared .*\[(\d+)\];", re.MULTILINE)
_ACCESS = re.compile(
  r"\b(ld|st)(?!\.(?:const|local|param|shared))"
  r"(?:\.(?!v\d)[a-zA-Z][\w:]*?)*?"
  r"(?:\.v(\d))?\.[busf](8|16|32|64|128)\b"
)
_USED = re.compile(r"Used (\d+) registers")
_SPILLED = re.compile(r"(\d+) bytes spill stores, (\d+) bytes spill loads")


class Assembly(NamedTuple):
  """Figures of one kernel's assembly."""

  name: str  # Name of the kernel.
  instruction: str  # Name of the HLO instruction that the kernel belongs to.
  threads: int  # Number of threads in a block.
  shared_bytes: int  # Shared memory of a block.
  # Number of instructions that load from global memory, by the bytes that each
  # loads for a thread (4 to 16).
  loads: dict[int, int]
  # Number of instructions that store to global memory, by bytes.
  stores: dict[int, int]
  registers: int | None  # Registers of a thread; None without an assembler.
  # Bytes stored and loaded for lack of registers; None without an assembler.
  spill_bytes: int | None

  @property
  def occupancy(self) -> float | None:
    """Share of a multiprocessor's threads that can be resident."""
    if self.registers is None:
      return None
    # Registers are allocated in multiples of eight.
    registers = -(-self.registers // 8) * 8 * self.threads
    shared = self.shared_bytes + SHARED_BYTES_RESERVED
    blocks = min(
      BLOCKS_PER_CORE,
      THREADS_PER_CORE // self.threads,
      REGISTERS_PER_CORE // registers,
      SHARED_BYTES_PER_CORE // shared,
    )
    return blocks * self.threads / THREADS_PER_CORE


def kernel_name(path: pathlib.Path) -> str | None:
  """Returns the name of the one kernel of a file; None if there is none."""
  entry = _ENTRY.search(path.read_text())
  return None if entry is None else entry.group(1)


def read_assembly(
  path: pathlib.Path, instruction: str, shared_bytes: int
) -> Assembly:
  """Reads the one kernel of a file."""
  text = path.read_text()
  entry, threads = _ENTRY.search(text), _THREADS.search(text)
  assert entry and threads, f"{path} must be PTX that XLA wrote"
  registers, spill_bytes = _run_assembler(path, text)
  return Assembly(
    entry.group(1),
    instruction,
    math.prod(int(n) for n in threads.group(1).split(",")),
    shared_bytes + sum(int(n) for n in _SHARED.findall(text)),
    _count_accesses(text, "ld"),
    _count_accesses(text, "st"),
    registers,
    spill_bytes,
  )


def _count_accesses(text: str, kind: str) -> dict[int, int]:
  widths = Counter(
    int(count or 1) * int(bits) // 8
    for found, count, bits in _ACCESS.findall(text)
    if found == kind
  )
  return dict(sorted(widths.items()))


def _run_assembler(
  path: pathlib.Path, text: str
) -> tuple[int | None, int | None]:
  """Returns registers and spilled bytes, as the assembler reports them."""
  ptxas = _find_ptxas()
  target = _TARGET.search(text)
  if ptxas is None or target is None:
    return None, None
  done = subprocess.run(
    [ptxas, "-v", f"-arch={target.group(1)}", path, "-o", os.devnull],
    capture_output=True,
    text=True,
  )
  used, spilled = _USED.search(done.stderr), _SPILLED.search(done.stderr)
  if done.returncode or used is None or spilled is None:
    raise RuntimeError(f"{ptxas} failed: {done.stderr}")
  return int(used.group(1)), sum(int(n) for n in spilled.groups())


@functools.cache
def _find_ptxas() -> str | None:
  """Returns the assembler of the extra `cuda-compile`, else one on PATH."""
  spec = importlib.util.find_spec("nvidia")
  for place in (spec.submodule_search_locations or []) if spec else []:
    for found in sorted(pathlib.Path(place).glob("cu*/bin/ptxas")):
      return str(found)
  return shutil.which("ptxas")
