"""Platforms fitted to measured curves: rates, latencies, sources."""

import dataclasses
import datetime
import os

import jax

from jaxmotion import perfmodel
from jaxmotion.calibration import _probes


def make_platform(
  name: str,
  axis: str,
  workers: int,
  call_s: float,
  curves: dict[str, perfmodel.Curve],
) -> perfmodel.Platform:
  """Returns a platform whose rates and latencies fit measured curves.

  Args:
    name: name of the platform.
    axis: name of the devices' axis.
    workers: number of devices that worked at once.
    call_s: seconds of an empty program.
    curves: curve of every operation.
  """
  passes, matmul = curves["elementwise"], curves["matmul float32"]
  device = perfmodel.Device(
    name=jax.devices()[0].device_kind,
    matmul_flops_per_s={"float32": fit_rate(matmul)},
    vector_flops_per_s=fit_rate(curves["vector"]),
    memory_rate=perfmodel.Rate(bytes_per_s=fit_rate(passes)),
    memory_bytes=float(_memory_bytes() / workers),
    kernel_s=passes.fit_line()[0],
    call_s=call_s,
    measured={
      name: curve
      for name, curve in curves.items()
      if name.split()[0] not in ("copy", "vector", *_probes.COLLECTIVES)
    },
  )
  host = _link_of_line(curves["copy"])
  link = _collective_link(workers, curves)
  axes: tuple[perfmodel.Axis, ...] = ()
  if link is not None:
    axes = (perfmodel.Axis(name=axis, workers=workers, link=link),)
  platform = perfmodel.Platform(
    name=name,
    device=device,
    to_host=host,
    from_host=host,
    axes=axes,
  )
  origin = _describe_origin(workers)
  texts = {
    "device.matmul_flops_per_s": ("matmul float32", matmul),
    "device.vector_flops_per_s": ("vector", curves["vector"]),
    "device.memory_rate": ("elementwise", passes),
    "device.kernel_s": ("elementwise", passes),
    "to_host.rate": ("copy", curves["copy"]),
    "from_host.rate": ("copy", curves["copy"]),
  }
  if link is not None:
    reduced = f"all_reduce {workers}"
    texts[f"axes.{axis}.rate"] = (reduced, curves[reduced])
    texts[f"axes.{axis}.latency_s"] = (reduced, curves[reduced])
  sources = {
    path: f"{origin}; {_describe_fit(*text)}" for path, text in texts.items()
  }
  sources["device.memory_bytes"] = f"{origin}; the system's, in equal parts"
  sources["device.call_s"] = f"{origin}; an empty program"
  return dataclasses.replace(platform, sources=sources)


def _describe_origin(workers: int) -> str:
  devices = jax.devices()
  emulated = devices[0].platform == "cpu" and jax.local_device_count() > 1
  kind = f"{workers} emulated devices" if emulated else f"{workers} devices"
  when = datetime.datetime.now(datetime.UTC).date()
  return f"measured {when}, JAX {jax.__version__}, {kind} at once"


def _describe_fit(name: str, curve: perfmodel.Curve) -> str:
  error = curve.fit_line()[2]
  return (
    f"{name}, {len(curve.sizes)} sizes, noise {curve.noise:.0%}, "
    f"off the line by {error:.0%}"
  )


def _memory_bytes() -> int:
  return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def fit_rate(curve: perfmodel.Curve) -> float:
  """Returns the rate of the line, or of the largest size if noise hides it."""
  _, slope, _ = curve.fit_line()
  largest, took_s = curve.sizes[-1], curve.seconds[-1]
  # A slope that adds up to less than a hundredth of the largest size's time is
  # rounding.
  return 1 / slope if slope * largest > took_s / 100 else largest / took_s


def _link_of_line(curve: perfmodel.Curve) -> perfmodel.Link:
  return perfmodel.Link(
    latency_s=curve.fit_line()[0],
    rate=perfmodel.Rate(bytes_per_s=fit_rate(curve)),
  )


def _collective_link(
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
