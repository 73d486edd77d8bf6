"""Describes the hardware of a training job: devices, memory and links."""

import dataclasses
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import jax.numpy as jnp

from jaxmotion import core
from jaxmotion.perfmodel import _figures, _ops

COLLECTIVES = (
  "all_reduce",
  "reduce_scatter",
  "all_gather",
  "all_to_all",
  "collective_permute",
  "broadcast",
)
_CODING = ("encode", "decode", "add")
_FLOPS = _figures.quantity_in(1e6, 1e18, "FLOP/s, not GFLOP/s or TFLOP/s")
_SECONDS = "seconds, not microseconds"
# Links from this rate on do not leave a site; slower ones may be long.
_SITE_RATE = _figures.gbit_per_s(10)
_SITE_SECONDS = f"{_SECONDS}; links of 10 Gbit/s or more stay within a site"


def _check_dtype_name(name: str, value: Any) -> str:
  """Returns the name that JAX gives a dtype, or raises."""
  # "f4" is another name of "float32": no curve would be found by it.
  try:
    known = isinstance(value, str) and jnp.dtype(value).name == value
  except TypeError:
    known = False
  if not known:
    raise ValueError(f"`{name}` must be the name of a dtype, got {value!r}.")
  return value


def _check_kernel_name(name: str, value: str) -> str:
  """Returns a name by which curves of a device are looked up, or raises."""
  kind, _, rest = value.partition(" ")
  if kind in _ops.MATMULS and rest:
    _check_dtype_name(name, rest)
  elif not (kind in _CODING and rest):
    kinds = [f"{k} DTYPE" for k in _ops.MATMULS]
    kinds += [f"{k} CODEC" for k in _CODING]
    kinds += [k for k in _ops.KINDS if k not in _ops.MATMULS]
    core.choice(kinds)(name, value)
  return value


def _check_collective_name(name: str, value: str) -> str:
  """Returns a name by which curves of a link are looked up, or raises."""
  op, _, workers = value.partition(" ")
  if op not in COLLECTIVES or not workers.isdecimal():
    raise ValueError(
      f"`{name}` must be a collective and its number of workers, such as "
      f"'all_reduce 4', got {value!r}: collectives are {COLLECTIVES}."
    )
  return value


def _read_only(
  noun: str, kind: core.Kind, key: core.Kind | None = None
) -> core.Kind:
  """Makes the kind of mappings that nobody can change once they are used."""
  mapping = core.mapping(noun, kind, key)
  return lambda name, value: MappingProxyType(mapping(name, value))


def _curves_named(key: core.Kind) -> core.Kind:
  """Makes the kind of measured curves with such names."""
  curve = core.instance(_figures.Curve, "a Curve")
  return _read_only("names to curves", curve, key)


@dataclasses.dataclass(frozen=True, kw_only=True)
@core.declare(
  name=core.text,
  matmul_flops_per_s=_read_only("dtypes to FLOP/s", _FLOPS, _check_dtype_name),
  vector_flops_per_s=_FLOPS,
  memory_rate=_figures.rate_in(1e6, 1e15),
  memory_bytes=_figures.quantity_in(1e6, 1e15, "bytes, not GB"),
  kernel_s=_figures.quantity_in(0, 0.1, _SECONDS),
  call_s=_figures.quantity_in(0, 1, _SECONDS),
  measured=_curves_named(_check_kernel_name),
)
class Device(_figures.Part):
  """One processor with its memory, as rates and measured curves.

  Args:
    name: name of the device, for reports.
    matmul_flops_per_s: FLOP/s of matmuls and convolutions, by dtype of their
      operands ("bfloat16"). Matmuls of other dtypes cannot be predicted.
    vector_flops_per_s: FLOP/s of all other operations.
    memory_rate: rate between memory and processor.
    memory_bytes: size of the memory in bytes.
    kernel_s: seconds of an empty kernel.
    call_s: seconds of calling a compiled program, once a step.
    measured: measured curves, which replace the rates. Their names are "matmul
      DTYPE" and "convolution DTYPE" by FLOPs; other classes of `Cost.totals` by
      bytes; "encode CODEC", "decode CODEC" and "add CODEC" by elements. "add"
      is decoding one more payload and adding it.

  Raises:
    TypeError: `memory_rate` is not a `Rate`, or a figure not a number.
    ValueError: a figure is not positive, or so small or large that it must
      have been given in another unit. Or a name is that of no dtype or curve.

  Example:
    >>> import dataclasses
    >>> from jaxmotion.perfmodel import gbyte_per_s
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
    ValueError: `memory_bytes` must be a number in [1e+06, 1e+15], got 16. \
Its unit is bytes, not GB.
  """

  name: str
  matmul_flops_per_s: Mapping[str, float]
  vector_flops_per_s: float
  memory_rate: _figures.Rate
  memory_bytes: float
  kernel_s: float
  call_s: float = 0.0
  measured: Mapping[str, _figures.Curve] = dataclasses.field(
    default_factory=dict
  )

  def __post_init__(self) -> None:
    if not self.matmul_flops_per_s:
      raise ValueError("`matmul_flops_per_s` must have a dtype, got none.")


@dataclasses.dataclass(frozen=True, kw_only=True)
@core.declare(
  latency_s=_figures.quantity_in(0, 1, _SECONDS),
  rate=_figures.rate_in(1e5, 1e13),
  shared_by=core.integer(1),
  efficiency=_read_only(
    "collectives to shares",
    core.number(0, 1, open_low=True),
    core.choice(COLLECTIVES),
  ),
  measured=_curves_named(_check_collective_name),
)
class Link(_figures.Part):
  """One connection between two workers, or between a device and its host.

  Args:
    latency_s: seconds from sending to arrival of an empty message.
    rate: rate in each direction.
    shared_by: number of workers that send over the link at the same time.
    efficiency: shares of `rate` in (0, 1] that collectives reach, by name
      ("all_gather"); 1 for all others.
    measured: measured curves "OP WORKERS" ("all_reduce 4") by payload bytes,
      which replace the rate for that number of workers.

  Raises:
    TypeError: `rate` is not a `Rate`: a plain number may be bits or bytes.
    ValueError: a figure is out of range, or a name is that of no collective.

  Example:
    >>> from jaxmotion.perfmodel import gbit_per_s
    >>> Link(latency_s=5e-5, rate=1e9)
    Traceback (most recent call last):
    ...
    TypeError: `rate` must be a Rate, made by gbit_per_s(...) or \
gbyte_per_s(...), got 1000000000.0: are these bits or bytes?
    >>> Link(latency_s=5e-5, rate=gbit_per_s(1)).transfer_seconds(125e6)
    1.00005
  """

  latency_s: float
  rate: _figures.Rate
  shared_by: int = 1
  efficiency: Mapping[str, float] = dataclasses.field(default_factory=dict)
  measured: Mapping[str, _figures.Curve] = dataclasses.field(
    default_factory=dict
  )

  @core.declare(nbytes=core.number(0))
  def transfer_seconds(self, nbytes: float) -> float:
    """Returns the seconds until the last of `nbytes` has arrived.

    Args:
      nbytes: number of bytes that one worker sends.

    Raises:
      TypeError: `nbytes` is not a number.
      ValueError: `nbytes` is negative, infinite or NaN.
    """
    return self.latency_s + nbytes * self.shared_by / self.rate.bytes_per_s


def _check_link(name: str, value: Any) -> Link:
  """Returns a link whose latency is that of links as fast as it, or raises."""
  link: Link = core.instance(Link, "a Link")(name, value)
  # What was measured is as it is, however busy the machine was.
  if link.rate >= _SITE_RATE and not link.measured:
    check = _figures.quantity_in(0, 2e-3, _SITE_SECONDS)
    check(f"{name}.latency_s", link.latency_s)
  return link


@dataclasses.dataclass(frozen=True, kw_only=True)
@core.declare(name=core.text, workers=core.integer(1), link=_check_link)
class Axis(_figures.Part):
  """Workers along one axis of the mesh, and the link between neighbors.

  Args:
    name: name of the mesh axis.
    workers: number of workers along it.
    link: link from each worker to the next.

  Raises:
    TypeError: `name` is not a string, `workers` not an integer, or `link` not
      a `Link`.
    ValueError: `workers` is not positive, or a link of 10 Gbit/s or more, not
      measured, has a latency of more than 2 ms.

  Example:
    >>> from jaxmotion.perfmodel import gbit_per_s
    >>> ethernet = Link(latency_s=5e-5, rate=gbit_per_s(10))
    >>> Axis(name="data", workers=8, link=ethernet).workers
    8
  """

  name: str
  workers: int
  link: Link


@dataclasses.dataclass(frozen=True, kw_only=True)
@core.declare(
  name=core.text,
  device=core.instance(Device, "a Device"),
  to_host=core.instance((Link, type(None)), "a Link or None"),
  from_host=core.instance((Link, type(None)), "a Link or None"),
  axes=core.sequence("Axis objects", core.instance(Axis, "an Axis")),
  sources=_read_only("figures to their origin", core.text),
)
class Platform(_figures.Part):
  """Devices of one kind, and the links between them and to their hosts.

  Args:
    name: name of the platform, for reports.
    device: the device of every worker.
    to_host: link from a device to the memory of its host, or None.
    from_host: link from the host's memory to the device, or None.
    axes: axes of the mesh, outermost (slowest) first.
    sources: origin of each figure, as text, by its path
      ("device.memory_rate", "axes.data.rate").

  Raises:
    TypeError: an argument is of another class.
    ValueError: two axes have one name, or `sources` names a figure that the
      platform does not have.

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
  to_host: Link | None
  from_host: Link | None
  axes: tuple[Axis, ...]
  sources: Mapping[str, str] = dataclasses.field(default_factory=dict)

  def __post_init__(self) -> None:
    names = [axis.name for axis in self.axes]
    if len(set(names)) < len(names):
      raise ValueError(f"`axes` must have names of their own, got {names}.")
    paths = self.figure_paths()
    for path in self.sources:
      core.choice(paths)(f"sources[{path!r}]", path)

  def figure_paths(self) -> list[str]:
    """Returns the paths of all figures, which `sources` may explain."""
    parts: dict[str, Any] = {
      "device": self.device,
      "to_host": self.to_host,
      "from_host": self.from_host,
      **{f"axes.{axis.name}": axis.link for axis in self.axes},
    }
    return [
      f"{path}.{field.name}"
      for path, part in parts.items()
      if part is not None  # A device may have no link to a host.
      for field in dataclasses.fields(part)
      if field.name != "name"
    ]

  def axis(self, name: str) -> Axis:
    """Returns the mesh axis of a name.

    Args:
      name: name of one of `axes`.

    Raises:
      TypeError: `name` is not a string.
      ValueError: the platform has no such axis.
    """
    return find_axis(self, "name", name)

  def resize(self, **workers: int) -> "Platform":
    """Returns the same platform with other numbers of workers.

    Args:
      **workers: new number of workers of each axis that changes.

    Raises:
      TypeError: a number of workers is not an integer.
      ValueError: the platform has no such axis, or a number is not positive.
    """
    for name, number in workers.items():
      find_axis(self, name, name)
      core.integer(1)(name, number)
    axes = tuple(
      dataclasses.replace(axis, workers=workers.get(axis.name, axis.workers))
      for axis in self.axes
    )
    return dataclasses.replace(self, axes=axes)


def find_axis(platform: Platform, argument: str, name: Any) -> Axis:
  """Returns the axis called `name`, or raises an error about `argument`."""
  core.text(argument, name)
  axes = {axis.name: axis for axis in platform.axes}
  core.choice(axes)(argument, name)
  return axes[name]


check_platform = core.instance(
  Platform, "a Platform, from `builtin_platform` or `load_platform`"
)


def named_axes(
  platform: Platform, mesh_axis: str | core.HostAxes
) -> tuple[Axis, Axis | None]:
  """Returns the axes of hosts and their devices, or of workers and None."""
  hosts, devices = core.split_axes(mesh_axis)
  return (
    find_axis(platform, "mesh_axis", hosts),
    find_axis(platform, "mesh_axis", devices) if devices else None,
  )
