"""Device meshes of a training job, over one process or several."""

import contextlib
import os

import jax
import numpy as np

from experiments.common.console import JobError

Mesh = jax.sharding.Mesh

DEVICE_AXIS = "device"
"""Mesh axis of the devices of one host, where hosts have several."""

_EMULATION_FLAG = "xla_force_host_platform_device_count"


def make_mesh(workers: int, processes: int = 1) -> Mesh:
  """Returns a mesh of `workers` devices."""
  # The axis of one process is `"data"`. Several processes have equal shares of
  # the workers: along `"host"` if each has one device, else along `"host"` and
  # `"device"`.
  # If the machine has fewer devices than workers, CPU devices are emulated.
  # Call this function before anything else asks JAX for a device.
  if workers % processes:
    raise JobError(
      f"`config.workers` must be a multiple of the {processes} processes, got"
      f" {workers}."
    )
  share = workers // processes
  if _EMULATION_FLAG not in os.environ.get("XLA_FLAGS", ""):
    # Raises if JAX has started; it may still have enough devices.
    with contextlib.suppress(RuntimeError):
      jax.config.update("jax_num_cpu_devices", share)
  if processes > 1:
    return _make_host_mesh(share, processes)
  devices = jax.devices()
  if len(devices) < workers:
    devices = jax.devices("cpu")
  if len(devices) < workers:
    raise JobError(
      "`config.workers` must be at most the devices JAX has started with, got"
      f" {workers} for {len(devices)}."
    )
  return jax.make_mesh(
    (workers,),
    ("data",),
    axis_types=(jax.sharding.AxisType.Auto,),
    devices=devices[:workers],
  )


def _make_host_mesh(share: int, processes: int) -> Mesh:
  rows = [
    [d for d in jax.devices() if d.process_index == index][:share]
    for index in range(processes)
  ]
  fewest = min(map(len, rows))
  if fewest < share:
    raise JobError(
      "`config.workers` must be at most the devices of all processes, got"
      f" {share} a process for {fewest}."
    )
  if share == 1:
    return Mesh(np.array(rows)[:, 0], ("host",))
  return Mesh(np.array(rows), ("host", DEVICE_AXIS))
