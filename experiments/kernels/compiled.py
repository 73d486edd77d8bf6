"""Figures of ops compiled for a GPU on a host without one."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from experiments import gpu_compile
from experiments.kernels import ops


class Figures(NamedTuple):
  """Figures of one implementation of an op, compiled and not run."""

  launches: int | None  # Number of kernels that a call launches.
  # Bytes that the kernels read and write, over the bytes of the op's arguments
  # and outputs.
  traffic_ratio: float | None
  spill_bytes: int | None  # Bytes that all kernels spill.
  # Registers of a thread; like the fields below, of the kernel that moves most
  # bytes.
  registers: int | None
  # Share of a multiprocessor's threads that can be resident.
  occupancy: float | None
  # Number of load instructions by their bytes for a thread.
  loads: dict[int, int]
  # Number of store instructions by their bytes for a thread.
  stores: dict[int, int]


def compile_op(
  op: ops.Op, implementation: str, target: str, size_bytes: int
) -> Figures:
  """Compiles an op for a GPU and returns its figures."""
  like = jax.ShapeDtypeStruct(ops.make_shape(size_bytes), jnp.float32)
  args, outputs = op.shapes(like)
  step = op.step(like, implementation)
  options = {"donate_argnums": 0, "keep_unused": True}
  compiled = gpu_compile.compile_for(
    step, outputs, *args, gpu=target, **options
  )
  return summarize(compiled, op.ideal_bytes(like))


def summarize(compiled: gpu_compile.Compiled, ideal_bytes: int) -> Figures:
  """Returns the figures of a compiled program."""
  traffic = compiled.traffic_bytes
  main = max(
    compiled.kernels, key=lambda k: k.launches * (k.read_bytes + k.write_bytes)
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
