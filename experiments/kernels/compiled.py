"""What the compiler makes of every op for a GPU that is not there."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from experiments import gpu_compile
from experiments.kernels.ops import Op, shape_of


class Figures(NamedTuple):
  """One implementation of an op, compiled, not run.

  Attributes:
    launches: kernels that a call launches.
    traffic_ratio: bytes that they read and write, to those of the op's
      arguments and outputs.
    spill_bytes: of all kernels.
    registers: of a thread; here and below, of the kernel that moves most.
    occupancy: the part of a multiprocessor's threads that can be resident.
    loads: instructions by the bytes that they load for a thread.
    stores: likewise.
  """

  launches: int | None
  traffic_ratio: float | None
  spill_bytes: int | None
  registers: int | None
  occupancy: float | None
  loads: dict[int, int]
  stores: dict[int, int]


def figures(op: Op, implementation: str, gpu: str, size_bytes: int) -> Figures:
  """Compiles an op for arrays of that many bytes of float32.

  Raises:
    NotImplementedError: the implementation does not take them.
  """
  like = jax.ShapeDtypeStruct(shape_of(size_bytes), jnp.float32)
  args, outputs = op.shapes(like)
  compiled = gpu_compile.compile_for(
    op.step(like, implementation),
    outputs,
    *args,
    gpu=gpu,
    donate_argnums=0,
    keep_unused=True,
  )
  return summarize(compiled, op.ideal_bytes(like))


def summarize(compiled: gpu_compile.Compiled, ideal_bytes: int) -> Figures:
  """Sums up a compiled program.

  Args:
    compiled: the program.
    ideal_bytes: the fewest that it could read and write.
  """
  traffic = compiled.traffic_bytes
  main = max(
    compiled.kernels,
    key=lambda k: k.launches * (k.read_bytes + k.write_bytes),
  )
  spills = [a.spill_bytes for a in compiled.assembly]
  of_main = [a for a in compiled.assembly if a.instruction == main.name]
  return Figures(
    compiled.launches,
    None if traffic is None else traffic / ideal_bytes,
    None if None in spills else sum(n or 0 for n in spills),
    of_main[0].registers if of_main else None,
    of_main[0].occupancy if of_main else None,
    of_main[0].loads if of_main else {},
    of_main[0].stores if of_main else {},
  )
