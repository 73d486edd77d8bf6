"""Measures this machine and writes what `jaxmotion.perfmodel` asks for.

  python -m experiments.perfmodel.calibrate --platform=results/here.json

Matrix products, convolutions, elementwise passes, reductions, codecs and
collectives, each at sizes that are equally far apart in their logarithms. All
devices work at once, as they do in a step. Repeats take turns, so that a slow
minute of the machine falls on all sizes alike; a size takes the lower quartile
of its repeats (what others do on the machine only adds to it), less what
calling an empty program takes. The measurements themselves are kept, beside the
line of least relative error through them, which gives rates and latencies.

Emulated devices (`--xla_force_host_platform_device_count` in XLA_FLAGS) share
the cores of this machine: what is measured on them is emulated, and says so.
"""

import dataclasses
import datetime
import os
from collections.abc import Callable, Sequence

import jax
import rich.progress
import rich.table
from absl import flags

from experiments.common import records, shared_flags
from experiments.common.console import make_console
from experiments.perfmodel.probes import (
  CODECS,
  COLLECTIVES,
  Turns,
  coding,
  collectives,
  compute,
  make_mesh,
  updates,
)
from jaxmotion import perfmodel
from jaxmotion.perfmodel import Curve, Rate

_PLATFORM = flags.DEFINE_string(
  "platform", None, "Where to write it (JSON).", allow_override=True
)
_JSON = shared_flags.define_rows()
_AXIS = flags.DEFINE_string(
  "axis", "data", "Name of the axis of devices.", allow_override=True
)
_WORKERS = flags.DEFINE_integer("workers", None, "Devices; all by default.", 1)
_SIZES = flags.DEFINE_integer("sizes", 8, "Sizes of each operation.", 2)
_REPEATS = flags.DEFINE_integer(
  "repeats", 20, "Of each size.", 1, allow_override=True
)
_LARGEST = flags.DEFINE_integer(
  "largest", 1 << 23, "Values of the largest array.", 1 << 12
)
_CODECS = flags.DEFINE_list("codecs", list(CODECS), "Codecs to time.")


def run(
  axis: str,
  workers: int,
  codecs: Sequence[str],
  largest: int,
  sizes: int,
  repeats: int,
) -> perfmodel.Platform:
  """Measures everything.

  Args:
    axis: what to call the devices' axis.
    workers: devices that work at once.
    codecs: names of `_probes.CODECS`.
    largest: values of the largest array.
    sizes: of each operation.
    repeats: of each size.

  Returns:
    The platform, with the curves and where and when they were measured.
  """
  turns = prepare(workers, codecs, largest, sizes)
  for _ in rich.progress.track(range(repeats), "calibrating"):
    turns.run()
  return make_platform(axis, workers, *turns.curves())


def prepare(
  workers: int,
  codecs: Sequence[str],
  largest: int,
  sizes: int,
  barrier: Callable[[], object] = lambda: None,
) -> Turns:
  """Compiles everything that is measured.

  Args:
    workers: devices that work at once.
    codecs: names of `_probes.CODECS`.
    largest: values of the largest array.
    sizes: of each operation.
    barrier: waits for the other processes of a job of several.
  """
  mesh = make_mesh(workers)
  probes = compute(mesh, largest, sizes)
  if codecs:
    probes += updates(mesh, largest, sizes)
  for name in codecs:
    probes += coding(mesh, name, largest, sizes)
  if workers > 1:
    probes += collectives(mesh, largest, sizes)
  return Turns(mesh, probes, barrier)


def make_platform(
  axis: str, workers: int, call_s: float, curves: dict[str, Curve]
) -> perfmodel.Platform:
  """Makes a platform of what was measured.

  Args:
    axis: what to call the devices' axis.
    workers: devices that worked at once.
    call_s: seconds of an empty program.
    curves: of every operation.
  """
  passes, product = curves["elementwise"], curves["matmul float32"]
  device = perfmodel.Device(
    name=jax.devices()[0].device_kind,
    matmul_flops_per_s={"float32": _rate(product)},
    vector_flops_per_s=_rate(curves["vector"]),
    memory_rate=Rate(bytes_per_s=_rate(passes)),
    memory_bytes=float(_memory_bytes() / workers),
    kernel_s=passes.fit_line()[0],
    call_s=call_s,
    measured={
      name: curve
      for name, curve in curves.items()
      if name.split()[0] not in ("copy", "vector", *COLLECTIVES)
    },
  )
  host = _line_link(curves["copy"])
  link = _collective_link(workers, curves)
  axes: tuple[perfmodel.Axis, ...] = ()
  if link is not None:
    axes = (perfmodel.Axis(name=axis, workers=workers, link=link),)
  platform = perfmodel.Platform(
    name=records.describe_machine(),
    device=device,
    to_host=host,
    from_host=host,
    axes=axes,
  )
  said = _said(workers)
  texts = {
    "device.matmul_flops_per_s": ("matmul float32", product),
    "device.vector_flops_per_s": ("vector", curves["vector"]),
    "device.memory_rate": ("elementwise", passes),
    "device.kernel_s": ("elementwise", passes),
    "to_host.rate": ("copy", curves["copy"]),
    "from_host.rate": ("copy", curves["copy"]),
  }
  if link is not None:
    name = f"all_reduce {workers}"
    texts[f"axes.{axis}.rate"] = (name, curves[name])
    texts[f"axes.{axis}.latency_s"] = (name, curves[name])
  sources = {path: f"{said}; {_fit(*text)}" for path, text in texts.items()}
  sources["device.memory_bytes"] = f"{said}; the system's, in equal parts"
  sources["device.call_s"] = f"{said}; an empty program"
  return dataclasses.replace(platform, sources=sources)


def _said(workers: int) -> str:
  devices = jax.devices()
  emulated = devices[0].platform == "cpu" and jax.local_device_count() > 1
  kind = f"{workers} emulated devices" if emulated else f"{workers} devices"
  when = datetime.datetime.now(datetime.UTC).date()
  return f"measured {when}, JAX {jax.__version__}, {kind} at once"


def _fit(name: str, curve: Curve) -> str:
  error = curve.fit_line()[2]
  return (
    f"{name}, {len(curve.sizes)} sizes, noise {curve.noise:.0%}, "
    f"off the line by {error:.0%}"
  )


def _memory_bytes() -> int:
  return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _rate(curve: Curve) -> float:
  """Of the line; of the largest size, where noise leaves no slope."""
  _, slope, _ = curve.fit_line()
  largest, took_s = curve.sizes[-1], curve.seconds[-1]
  # A slope that makes no hundredth of what the largest size takes is rounding.
  return 1 / slope if slope * largest > took_s / 100 else largest / took_s


def _line_link(curve: Curve) -> perfmodel.Link:
  return perfmodel.Link(
    latency_s=curve.fit_line()[0], rate=Rate(bytes_per_s=_rate(curve))
  )


def _collective_link(
  workers: int, curves: dict[str, Curve]
) -> perfmodel.Link | None:
  """The link that collectives seem to go over; None of one worker.

  Its rate is that of the fastest collective, and others have their share; its
  latency is that of a hop of the all-reduce around the ring.
  """
  own = {
    op: curves[f"{op} {workers}"]
    for op in COLLECTIVES
    if f"{op} {workers}" in curves
  }
  if not own:
    return None
  rates = {
    op: perfmodel.collective_traffic(op, 1.0, workers).wire_bytes * _rate(curve)
    for op, curve in own.items()
  }
  best = max(rates.values())
  hops = perfmodel.collective_traffic("all_reduce", 1.0, workers).hops
  return perfmodel.Link(
    latency_s=own["all_reduce"].fit_line()[0] / hops,
    rate=Rate(bytes_per_s=best),
    efficiency={op: rate / best for op, rate in rates.items()},
    measured={f"{op} {workers}": curve for op, curve in own.items()},
  )


def make_table(platform: perfmodel.Platform) -> rich.table.Table:
  """A line for each curve."""
  table = rich.table.Table(
    title=platform.name, caption=platform.sources["device.kernel_s"]
  )
  for name in ("operation", "sizes", "smallest", "largest"):
    table.add_column(name, justify="left" if name == "operation" else "right")
  for name in ("noise", "off the line", "left-out error"):
    table.add_column(name, justify="right")
  for name, curve in _curves(platform).items():
    table.add_row(
      name,
      f"{curve.sizes[0]:.3g} to {curve.sizes[-1]:.3g}",
      f"{1e3 * curve.seconds[0]:.3g} ms",
      f"{1e3 * curve.seconds[-1]:.3g} ms",
      f"{curve.noise:.0%}",
      f"{curve.fit_line()[2]:.0%}",
      f"{left_out_error(curve):.0%}",
    )
  return table


def left_out_error(curve: Curve) -> float:
  """The mean relative error at a size that is interpolated without it."""
  errors = []
  for i in range(1, len(curve.sizes) - 1):
    rest = dataclasses.replace(
      curve,
      sizes=curve.sizes[:i] + curve.sizes[i + 1 :],
      seconds=curve.seconds[:i] + curve.seconds[i + 1 :],
    )
    errors.append(abs(rest.seconds_at(curve.sizes[i]) / curve.seconds[i] - 1))
  return sum(errors) / max(len(errors), 1)


def _curves(platform: perfmodel.Platform) -> dict[str, Curve]:
  found = dict(platform.device.measured)
  for axis in platform.axes:
    found.update(axis.link.measured)
  return found


def make_rows(platform: perfmodel.Platform) -> list[records.Row]:
  """A row for each size of each curve."""
  return [
    records.Row(
      "perfmodel_calibrate",
      f"{name} at {size:.6g}",
      "seconds",
      seconds,
      "s",
      None,
      None,
      curve.noise * seconds,
      platform.name,
      jax.__version__,
    )
    for name, curve in _curves(platform).items()
    for size, seconds in zip(curve.sizes, curve.seconds, strict=True)
  ]


def main() -> None:
  """Measures, prints the table, and writes the platform and the rows."""
  platform = run(
    _AXIS.value,
    _WORKERS.value or jax.device_count(),
    _CODECS.value,
    _LARGEST.value,
    _SIZES.value,
    _REPEATS.value,
  )
  make_console().print(make_table(platform))
  if _PLATFORM.value:
    perfmodel.save_platform(platform, _PLATFORM.value)
  if _JSON.value:
    records.write_rows(_JSON.value, make_rows(platform))


if __name__ == "__main__":
  shared_flags.run_main(main)
