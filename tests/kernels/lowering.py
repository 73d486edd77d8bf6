"""Kernels on a host: interpreted, and lowered for devices that are absent."""

import functools
from unittest import mock

import jax
from jax.sharding import AbstractDevice, AbstractMesh, AxisType

from jaxmotion.kernels import _triton

GPUS = ("NVIDIA H200", "NVIDIA A100-SXM4-80GB")


def on_gpus(cases):
  """Returns (case, gpu): all cases on the first GPU, one on every other."""
  cases = list(cases)
  return [(c, GPUS[0]) for c in cases] + [(cases[0], g) for g in GPUS[1:]]


def interpret(fn):
  """Returns a function whose kernels run as `jax.numpy`."""

  @functools.wraps(fn)
  def run(*args, **static):
    with mock.patch.object(_triton, "INTERPRET", True):
      return fn(*args, **static)

  return run


def lower(fn, *args, gpu="NVIDIA H200"):
  """Returns the program of `fn` for that GPU, as text."""
  device = AbstractDevice(gpu, None, "gpu")
  mesh = AbstractMesh(
    (1,), ("x",), axis_types=(AxisType.Auto,), abstract_device=device
  )
  with jax.sharding.use_abstract_mesh(mesh):
    # A new function each time, so that dispatch is traced anew.
    traced = jax.jit(lambda *a: fn(*a)).trace(*args)
    return traced.lower(lowering_platforms=("cuda",)).as_text()


def kernel_calls(fn, *args, gpu="NVIDIA H200"):
  """Returns how many Triton kernels the program for that GPU launches."""
  return lower(fn, *args, gpu=gpu).count("@__gpu$xla.gpu.triton(")


def mosaic_kernel_calls(fn, *args):
  """Returns how many Mosaic GPU kernels the program for a GPU launches."""
  return lower(fn, *args).count("@mosaic_gpu")
