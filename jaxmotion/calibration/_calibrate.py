"""Times probes on this machine, and fits a platform to the measured curves."""

import datetime
import functools
import os
from collections.abc import Callable, Sequence
from typing import Any

import jax

from jaxmotion import core, perfmodel
from jaxmotion.calibration import _probes
from jaxmotion.codecs import Codec
from jaxmotion.codecs.extend import check_codec


@core.declare(
  name=core.text,
  axis=core.text,
  workers=core.optional(core.integer(1)),
  codecs=core.sequence(
    "codecs", functools.partial(check_codec, one_round=True)
  ),
  largest=core.integer(1 << 12, 2**31 - 1),
  sizes=core.integer(2, 64),
  repeats=core.integer(1, 10_000),
  report=core.optional(core.function),
)
def calibrate_platform(
  name: str = "here",
  *,
  axis: str = "data",
  workers: int | None = None,
  codecs: Sequence[Codec] = (),
  largest: int = 1 << 23,
  sizes: int = 8,
  repeats: int = 20,
  report: Callable[[int], Any] | None = None,
) -> perfmodel.Platform:
  """Times operations on this machine and returns a platform that fits them.

  It times matmuls, convolutions, elementwise passes, reductions, copies to the
  device, codecs and collectives, each at sizes equally far apart in their
  logarithms. All devices work at once, as they do in a step. Sizes alternate,
  so that a slow minute of the machine falls on all alike. A size takes the
  lower quartile of its repeats (other processes only add to it), less the time
  of calling an empty program. The platform keeps the measurements, beside the
  line of least relative error through them, which gives rates and latencies.

  Args:
    name: name of the platform.
    axis: name of the axis of devices.
    workers: number of devices that work at once; None: all. A platform of one
      has no axis: `jaxmotion platform` adds links.
    codecs: codecs to time.
    largest: elements of the largest array.
    sizes: number of sizes of each operation.
    repeats: number of times that each size is timed.
    report: called with the number of rounds done, after each.

  Returns:
    The platform, with its curves, the date and the place of the measurement.

  Raises:
    TypeError: an argument of another type.
    ValueError: more workers than devices, or a number out of its range.

  Example:
    >>> found = calibrate_platform(workers=1, largest=4096, sizes=2, repeats=1)
    >>> found.device.memory_rate.bytes_per_s > 0
    True
  """
  workers = jax.device_count() if workers is None else workers
  timer = prepare_timer(workers, codecs, largest, sizes)
  for done in range(1, repeats + 1):
    timer.run_round()
    if report is not None:
      report(done)
  return make_platform(name, axis, workers, *timer.make_curves())


def prepare_timer(
  workers: int,
  codecs: Sequence[Codec],
  largest: int,
  sizes: int,
  barrier: Callable[[], object] = lambda: None,
) -> _probes.ProbeTimer:
  """Compiles all operations that are timed."""
  # `barrier` waits for the other processes of a job of several.
  mesh = _probes.make_mesh(workers)
  probes = list(_probes.compute_probes(mesh, largest, sizes))
  if codecs:
    probes += _probes.update_probes(mesh, largest, sizes)
  for codec in codecs:
    probes += _probes.codec_probes(mesh, codec, largest, sizes)
  if workers > 1:
    probes += _probes.collective_probes(mesh, largest, sizes)
  return _probes.ProbeTimer(mesh, probes, barrier)


def make_platform(
  name: str,
  axis: str,
  workers: int,
  call_s: float,
  curves: dict[str, perfmodel.Curve],
) -> perfmodel.Platform:
  """Returns a platform whose rates and latencies fit measured curves."""
  passes, matmul = curves["elementwise"], curves["matmul float32"]
  system_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
  device = perfmodel.Device(
    name=jax.devices()[0].device_kind,
    matmul_flops_per_s={"float32": fit_rate(matmul)},
    vector_flops_per_s=fit_rate(curves["vector"]),
    memory_rate=perfmodel.Rate(bytes_per_s=fit_rate(passes)),
    memory_bytes=system_bytes / workers,
    kernel_s=passes.fit_line()[0],
    call_s=call_s,
    measured={
      name: curve
      for name, curve in curves.items()
      if name.split()[0] not in ("copy", "vector", *_probes.COLLECTIVES)
    },
  )
  host = perfmodel.Link(
    latency_s=curves["copy"].fit_line()[0],
    rate=perfmodel.Rate(bytes_per_s=fit_rate(curves["copy"])),
  )
  link = collective_link(workers, curves)
  axes: tuple[perfmodel.Axis, ...] = ()
  if link is not None:
    axes = (perfmodel.Axis(name=axis, workers=workers, link=link),)
  origin = describe_origin(workers)
  names = {
    "device.matmul_flops_per_s": "matmul float32",
    "device.vector_flops_per_s": "vector",
    "device.memory_rate": "elementwise",
    "device.kernel_s": "elementwise",
    "to_host.rate": "copy",
    "from_host.rate": "copy",
  }
  if link is not None:
    for field in ("rate", "latency_s"):
      names[f"axes.{axis}.{field}"] = f"all_reduce {workers}"
  sources = {
    path: f"{origin}; {_describe_fit(name, curves[name])}"
    for path, name in names.items()
  }
  sources["device.memory_bytes"] = f"{origin}; the system's, in equal parts"
  sources["device.call_s"] = f"{origin}; an empty program"
  return perfmodel.Platform(
    name=name,
    device=device,
    to_host=host,
    from_host=host,
    axes=axes,
    sources=sources,
  )


def describe_origin(workers: int) -> str:
  """Says when and on what a platform was measured, for its sources."""
  devices = jax.devices()
  emulated = devices[0].platform == "cpu" and jax.local_device_count() > 1
  kind = f"{workers} emulated devices" if emulated else f"{workers} devices"
  when = datetime.datetime.now(datetime.UTC).date()
  return f"measured {when}, JAX {jax.__version__}, {kind} at once"


def _describe_fit(name: str, curve: perfmodel.Curve) -> str:
  """Says how well the line through a curve fits it, for a source."""
  error = curve.fit_line()[2]
  return (
    f"{name}, {len(curve.sizes)} sizes, noise {curve.noise:.0%}, "
    f"off the line by {error:.0%}"
  )


def fit_rate(curve: perfmodel.Curve) -> float:
  """Returns the rate of the line, or of the largest size if noise hides it."""
  _, slope, _ = curve.fit_line()
  largest, took_s = curve.sizes[-1], curve.seconds[-1]
  # A slope that adds up to less than a hundredth of the largest size's time is
  # rounding.
  return 1 / slope if slope * largest > took_s / 100 else largest / took_s


def collective_link(
  workers: int, curves: dict[str, perfmodel.Curve]
) -> perfmodel.Link | None:
  """Returns the link that explains the collectives; None for one worker."""
  # Its rate is that of the fastest collective; the others have an efficiency.
  # Its latency is that of one hop of the ring all-reduce.
  measured = {
    op: curves[f"{op} {workers}"]
    for op in _probes.COLLECTIVES
    if f"{op} {workers}" in curves
  }
  if not measured:
    return None
  rates = {
    op: perfmodel.collective_traffic(op, 1.0, workers).wire_bytes
    * fit_rate(curve)
    for op, curve in measured.items()
  }
  best = max(rates.values())
  hops = perfmodel.collective_traffic("all_reduce", 1.0, workers).hops
  return perfmodel.Link(
    latency_s=measured["all_reduce"].fit_line()[0] / hops,
    rate=perfmodel.Rate(bytes_per_s=best),
    efficiency={op: rate / best for op, rate in rates.items()},
    measured={f"{op} {workers}": curve for op, curve in measured.items()},
  )
