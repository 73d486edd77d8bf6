"""Measures the links between the hosts of a running job."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from jaxmotion import core, perfmodel
from jaxmotion.calibration import _calibrate, _probes


@core.declare(
  largest=core.integer(1 << 12, 2**31 - 1),
  sizes=core.integer(2, 64),
  repeats=core.integer(1, 10_000),
)
def measure_links(
  name: str,
  base: perfmodel.Platform,
  *,
  largest: int,
  sizes: int,
  repeats: int,
  report: Callable[[int], Any],
) -> tuple[perfmodel.Platform, dict[str, float]]:
  """Times collectives between hosts while all their devices send at once.

  Args:
    name: name of the platform.
    base: platform whose device, and link between devices of a host, is taken.
    largest: elements of the largest array.
    sizes: number of sizes of each collective.
    repeats: number of times that each size is timed.
    report: called with the number of rounds done, after each.

  Returns:
    The platform, whose first axis is "host", and the bytes/s of a device's
    transfers from host 0 to each other one, back, and both at once.

  Raises:
    TypeError: a number of another type.
    ValueError: a number out of its range; the job has one process; or its
      hosts have several devices and `base` has no link between them.
  """
  hosts, own = jax.process_count(), jax.local_device_count()
  if hosts == 1:
    raise ValueError("`num_processes` must be at least 2, got 1.")
  if own > 1 and not base.axes:
    raise ValueError(
      f"`platform` must have a link between the {own} devices of a host, got "
      "one of a single device."
    )
  devices = sorted(jax.devices(), key=lambda d: (d.process_index, d.id))
  grid = np.array(devices).reshape(hosts, own)
  mesh = jax.sharding.Mesh(grid, ("axis", "device"))
  timer = _probes.ProbeTimer(
    mesh,
    [
      *_probes.collective_probes(mesh, largest, sizes),
      *_probes.pair_probes(mesh, largest),
    ],
    lambda: multihost_utils.sync_global_devices("links"),
  )
  for done in range(1, repeats + 1):
    timer.run_round()
    report(done)
  timer.take_slowest()
  _, curves = timer.make_curves()
  link = _calibrate.collective_link(hosts, curves)
  assert link is not None  # There are at least two hosts.
  axes = [perfmodel.Axis(name="host", workers=hosts, link=link)]
  if own > 1:
    axes.append(dataclasses.replace(base.axes[-1], name="device", workers=own))
  origin = _calibrate.describe_origin(hosts * own)
  platform = dataclasses.replace(
    base,
    name=name,
    axes=tuple(axes),
    sources=dict(drop_axes(base).sources)
    | {f"axes.host.{field}": origin for field in ("rate", "latency_s")},
  )
  pairs = {name: curve for name, curve in curves.items() if " to " in name}
  return platform, {k: c.sizes[-1] / c.seconds[-1] for k, c in pairs.items()}


def drop_axes(platform: perfmodel.Platform) -> perfmodel.Platform:
  """Returns the device of a platform, without links between workers."""
  sources = {
    path: source
    for path, source in platform.sources.items()
    if not path.startswith("axes.")
  }
  return dataclasses.replace(platform, axes=(), sources=sources)
