"""What a training job runs on: devices, their memory and their links."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from jaxmotion.core import check_choice, check_int, check_number
from jaxmotion.perfmodel.platform._curve import Curve
from jaxmotion.perfmodel.platform._units import Rate, check_quantity, check_rate


@dataclasses.dataclass(frozen=True, kw_only=True)
class Device:
  """One processor with its memory.

  Args:
    name: what it is.
    matmul_flops_per_s: FLOP/s of matrix products and convolutions, for each
      dtype of their operands ("bfloat16"). A dtype that is not here cannot be
      predicted.
    vector_flops_per_s: FLOP/s of everything else.
    memory_rate: between memory and processor.
    memory_bytes: size of the memory.
    kernel_s: seconds that a kernel takes however little it does.
    call_s: seconds that calling a compiled program takes, once a step.
    measured: what was measured instead: "matmul DTYPE" and "convolution
      DTYPE" by FLOPs; other classes of `Cost.totals` by bytes; "encode CODEC",
      "decode CODEC" and "add CODEC" (one more payload) by values.

  Raises:
    TypeError: `memory_rate` is not a `Rate`.
    ValueError: a figure is not positive, or so small or large that its unit
      must be another one.

  Example:
    >>> from jaxmotion.perfmodel import gbyte_per_s
    >>> import dataclasses
    >>> device = Device(
    ...   name="example",
    ...   matmul_flops_per_s={"float32": 1e12},
    ...   vector_flops_per_s=1e11,
    ...   memory_rate=gbyte_per_s(50),
    ...   memory_bytes=16e9,
    ...   kernel_s=1e-6,
    ... )
    >>> dataclasses.replace(device, memory_bytes=16)
    Traceback (most recent call last):
    ...
    ValueError: `memory_bytes` must be at least 1e+06 (in bytes, not GB), \
got 16.
  """

  name: str
  matmul_flops_per_s: Mapping[str, float]
  vector_flops_per_s: float
  memory_rate: Rate
  memory_bytes: float
  kernel_s: float
  call_s: float = 0.0
  measured: Mapping[str, Curve] = dataclasses.field(default_factory=dict)

  def __post_init__(self) -> None:
    rates = dict(self.matmul_flops_per_s)
    object.__setattr__(self, "matmul_flops_per_s", MappingProxyType(rates))
    _keep_curves(self)
    unit = "in FLOP/s, not GFLOP/s or TFLOP/s"
    if not rates:
      raise ValueError("`matmul_flops_per_s` must have a dtype, got none.")
    for dtype, rate in rates.items():
      check_quantity(f"matmul_flops_per_s[{dtype!r}]", rate, 1e6, 1e18, unit)
    check_quantity(
      "vector_flops_per_s", self.vector_flops_per_s, 1e6, 1e18, unit
    )
    check_rate("memory_rate", self.memory_rate, 1e6, 1e15)
    unit = "in bytes, not GB"
    check_quantity("memory_bytes", self.memory_bytes, 1e6, 1e15, unit)
    unit = "in seconds, not microseconds"
    check_quantity("kernel_s", self.kernel_s, 0.0, 0.1, unit)
    check_quantity("call_s", self.call_s, 0.0, 1.0, unit)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Link:
  """One way from a worker to another, or to its host.

  Args:
    latency_s: seconds from sending to arrival, of no bytes.
    rate: in each direction.
    full_duplex: whether both directions can be used at once.
    shared_by: workers that send over it at the same time.
    efficiency: the share of `rate` that a collective reaches, for each that
      does not reach all of it ("all_gather").
    measured: what was measured instead, "OP WORKERS" ("all_reduce 4"), by
      payload bytes; used for that number of workers alone.

  Raises:
    TypeError: `rate` is not a `Rate`: a number alone may be bits or bytes.
    ValueError: a figure that no link has.

  Example:
    >>> from jaxmotion.perfmodel import gbit_per_s
    >>> Link(latency_s=5e-5, rate=1e9)
    Traceback (most recent call last):
    ...
    TypeError: `rate` must be a Rate, made by gbit_per_s(...) or \
gbyte_per_s(...), got 1000000000.0: are these bits or bytes?
    >>> Link(latency_s=5e-5, rate=gbit_per_s(1)).seconds(125e6)
    1.00005
  """

  latency_s: float
  rate: Rate
  full_duplex: bool = True
  shared_by: int = 1
  efficiency: Mapping[str, float] = dataclasses.field(default_factory=dict)
  measured: Mapping[str, Curve] = dataclasses.field(default_factory=dict)

  def __post_init__(self) -> None:
    shares = dict(self.efficiency)
    object.__setattr__(self, "efficiency", MappingProxyType(shares))
    _keep_curves(self)
    unit = "in seconds, not microseconds"
    check_quantity("latency_s", self.latency_s, 0.0, 1.0, unit)
    check_rate("rate", self.rate, 1e3, 1e13)
    check_choice("full_duplex", self.full_duplex, (True, False))
    check_int("shared_by", self.shared_by, 1)
    for op, share in shares.items():
      check_number(f"efficiency[{op!r}]", share, 0, 1, open_low=True)

  def seconds(self, nbytes: float) -> float:
    """Seconds until the last of `nbytes` has arrived.

    Args:
      nbytes: what one worker sends.
    """
    return self.latency_s + nbytes * self.shared_by / self.rate.bytes_per_s


@dataclasses.dataclass(frozen=True, kw_only=True)
class Axis:
  """The workers along one axis of the mesh, and the link between them.

  Args:
    name: of the mesh axis.
    workers: how many there are.
    link: from each to the next.

  Example:
    >>> from jaxmotion.perfmodel import gbit_per_s
    >>> ethernet = Link(latency_s=5e-5, rate=gbit_per_s(10))
    >>> Axis(name="data", workers=8, link=ethernet).workers
    8
  """

  name: str
  workers: int
  link: Link

  def __post_init__(self) -> None:
    check_int("workers", self.workers, 1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Platform:
  """Devices, and the links between them and to their hosts.

  Args:
    name: what it is.
    device: each of the workers, all of one kind.
    to_host: link from a device to the memory of its host.
    from_host: the way back.
    axes: the mesh, outermost (slowest) axis first.
    sources: where each figure is from, as text, by its path
      ("device.memory_rate", "axes.data.rate").

  Raises:
    ValueError: two axes of one name, or a source for a figure that is not
      there.

  Example:
    >>> from jaxmotion.perfmodel import builtin_platform
    >>> cluster = builtin_platform("ethernet_10gbit").resize(data=64)
    >>> cluster.axis("data").workers
    64
    >>> print(cluster.axis("data").link.rate)
    1.25 GB/s = 10 Gbit/s
  """

  name: str
  device: Device
  to_host: Link
  from_host: Link
  axes: tuple[Axis, ...]
  sources: Mapping[str, str] = dataclasses.field(default_factory=dict)

  def __post_init__(self) -> None:
    object.__setattr__(self, "axes", tuple(self.axes))
    sources = dict(self.sources)
    object.__setattr__(self, "sources", MappingProxyType(sources))
    names = [axis.name for axis in self.axes]
    if len(set(names)) < len(names):
      raise ValueError(f"`axes` must have names of their own, got {names}.")
    for path in sources:
      check_choice(f"sources[{path!r}]", path, self.figures())

  def figures(self) -> list[str]:
    """The paths of all figures, which `sources` may explain."""
    kinds: dict[str, Any] = {
      "device": self.device,
      "to_host": self.to_host,
      "from_host": self.from_host,
      **{f"axes.{axis.name}": axis.link for axis in self.axes},
    }
    return [
      f"{path}.{field.name}"
      for path, part in kinds.items()
      for field in dataclasses.fields(part)
      if field.name != "name"
    ]

  def axis(self, name: str) -> Axis:
    """The axis of that name.

    Raises:
      ValueError: there is none.
    """
    return find_axis(self, "name", name)

  def resize(self, **workers: int) -> Platform:
    """The same platform with other numbers of workers.

    Args:
      **workers: for each axis that changes, its new number.
    """
    for name in workers:
      self.axis(name)
    axes = tuple(
      dataclasses.replace(axis, workers=workers.get(axis.name, axis.workers))
      for axis in self.axes
    )
    return dataclasses.replace(self, axes=axes)


def find_axis(platform: Platform, argument: str, name: str) -> Axis:
  """Returns the axis called `name`, or raises an error about `argument`."""
  found = next((axis for axis in platform.axes if axis.name == name), None)
  if found is None:
    names = ", ".join(repr(axis.name) for axis in platform.axes)
    raise ValueError(f"`{argument}` must be one of {names}, got {name!r}.")
  return found


def _keep_curves(part: Device | Link) -> None:
  curves = dict(part.measured)
  object.__setattr__(part, "measured", MappingProxyType(curves))
  for name, curve in curves.items():
    if not isinstance(curve, Curve):
      raise TypeError(f"`measured[{name!r}]` must be a Curve, got {curve!r}.")
