"""Records of a function's cost: kernels, and totals per operation class."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import NamedTuple

from jaxmotion import core
from jaxmotion.perfmodel import _names
from jaxmotion.perfmodel.cost import _fusion


class Total(NamedTuple):
  """Totals over all operations of one class.

  Args:
    flops: FLOPs; each operation counts once, into however many kernels it is
      fused.
    unfused_bytes: bytes moved if every operation were a kernel of its own.
    bytes: bytes moved by the kernels that end in an operation of this class.
    kernels: number of those kernels.

  Example:
    >>> from jaxmotion import perfmodel
    >>> x = jax.ShapeDtypeStruct((128, 128), "float32")
    >>> cost = perfmodel.predict_cost(jnp.matmul, x, x)
    >>> sorted(cost.totals), cost.totals["matmul"].flops
    (['matmul'], 4194304.0)
  """

  flops: float = 0.0
  unfused_bytes: float = 0.0
  bytes: float = 0.0
  kernels: float = 0.0


@dataclasses.dataclass(frozen=True)
class Cost:
  """FLOPs, bytes and memory of one execution of a function.

  Args:
    kernels: kernels in program order; those of a loop's body have the loop's
      trips as count.
    totals: totals of every operation class that occurs.
    written: for each leaf of the result, the number of kernels after which
      it is in memory.
    peak_bytes: most bytes of arguments, results and temporaries at once.
    unknown: number of operations per primitive whose FLOPs are unknown
      (counted as 0), or that is taken to run the program it holds once.

  Example:
    >>> import jax
    >>> from jaxmotion.perfmodel import predict_cost
    >>> a = jax.ShapeDtypeStruct((64, 32), "float32")
    >>> b = jax.ShapeDtypeStruct((32, 16), "float32")
    >>> print(predict_cost(lambda a, b: jax.nn.relu(a @ b), a, b))
    kind         flops  bytes  unfused_bytes  kernels
    matmul       65536  14336          14336        1
    elementwise   1024   8192           8192        1
    total        66560  22528          22528        2
  """

  kernels: tuple[_fusion.Kernel, ...]
  totals: Mapping[str, Total]
  written: tuple[int, ...]
  peak_bytes: int
  unknown: Mapping[str, float]

  @property
  def flops(self) -> float:
    """FLOPs of all operations, each counted once."""
    return math.fsum(total.flops for total in self.totals.values())

  @property
  def bytes(self) -> float:
    """Bytes between memory and processor, of the fused program."""
    return math.fsum(kernel.bytes * kernel.count for kernel in self.kernels)

  @property
  def unfused_bytes(self) -> float:
    """Bytes if every operation read and wrote memory: an upper bound."""
    return math.fsum(total.unfused_bytes for total in self.totals.values())

  def __str__(self) -> str:
    header = ("kind", "flops", "bytes", "unfused_bytes", "kernels")
    rows: list[tuple[str, ...]] = [header]
    every = Total(*map(math.fsum, zip(*self.totals.values(), strict=True)))
    for kind in (*_names.KINDS, "total"):
      total = every if kind == "total" else self.totals.get(kind)
      if total is not None:
        values = (total.flops, total.bytes, total.unfused_bytes, total.kernels)
        rows.append((kind, *(f"{value:.10g}" for value in values)))
    return core.text_table(rows, right=range(1, len(header)))
