"""Reads a kernel's PTX: registers, spills and width of memory accesses."""

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

from experiments.gpu_compile import targets

_ENTRY = re.compile(r"^\.visible \.entry ([\w$]+)\(", re.MULTILINE)
_TARGET = re.compile(r"^\.target (\w+)", re.MULTILINE)
_THREADS = re.compile(r"^\.(?:reqntid|maxntid) ([\d, ]+)", re.MULTILINE)
_SHARED = re.compile(r"^\s*\.shared .*\[(\d+)\];", re.MULTILINE)
_ACCESS = re.compile(
  # Mosaic GPU leaves out the memory, and so loads from any.
  r"\b(ld|st)(?!\.(?:const|local|param|shared))"
  r"(?:\.(?!v\d)[a-zA-Z][\w:]*?)*?"
  r"(?:\.v(\d))?\.[busf](8|16|32|64|128)\b"
)
_USED = re.compile(r"Used (\d+) registers")
_SPILLED = re.compile(r"(\d+) bytes spill stores, (\d+) bytes spill loads")


class Assembly(NamedTuple):
  """Figures of one kernel's assembly.

  Attributes:
    name: name of the kernel.
    instruction: name of the HLO instruction that the kernel belongs to.
    threads: number of threads in a block.
    shared_bytes: shared memory of a block.
    loads: number of instructions that load from global memory, by the bytes
      that each loads for a thread (4 to 16).
    stores: number of instructions that store to global memory, by bytes.
    registers: registers of a thread; None without an assembler.
    spill_bytes: bytes stored and loaded for lack of registers; None without an
      assembler.
  """

  name: str
  instruction: str
  threads: int
  shared_bytes: int
  loads: dict[int, int]
  stores: dict[int, int]
  registers: int | None
  spill_bytes: int | None

  @property
  def occupancy(self) -> float | None:
    """Share of a multiprocessor's threads that can be resident."""
    if self.registers is None:
      return None
    # Registers are allocated in multiples of eight.
    registers = -(-self.registers // 8) * 8 * self.threads
    shared = self.shared_bytes + targets.SHARED_BYTES_RESERVED
    blocks = min(
      targets.BLOCKS_PER_CORE,
      targets.THREADS_PER_CORE // self.threads,
      targets.REGISTERS_PER_CORE // registers,
      targets.SHARED_BYTES_PER_CORE // shared,
    )
    return blocks * self.threads / targets.THREADS_PER_CORE


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
