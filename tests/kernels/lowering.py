"""Lowering of kernels for devices that are absent."""

import jax
from jax.sharding import AbstractDevice, AbstractMesh, AxisType

GPUS = ("NVIDIA H200", "NVIDIA A100-SXM4-80GB")


def on_gpus(cases):
  """Returns (case, gpu): all cases on the first GPU, one on every other."""
  cases = list(cases)
  return [(c, GPUS[0]) for c in cases] + [(cases[0], g) for g in GPUS[1:]]


def lower(fn, *args, gpu="NVIDIA H200"):
  """Returns the program of `fn` for that GPU, as text."""
  return _lower_on(fn, args, AbstractDevice(gpu, None, "gpu"), "cuda")


def lower_for_tpu(fn, *args):
  """Returns the program of `fn` for a TPU, as text."""
  return _lower_on(fn, args, AbstractDevice("TPU v5e", 1, "tpu"), "tpu")


def kernel_calls(fn, *args, gpu="NVIDIA H200"):
  """Returns how many Triton kernels the program for that GPU launches."""
  return lower(fn, *args, gpu=gpu).count("@__gpu$xla.gpu.triton(")


def mosaic_kernel_calls(fn, *args):
  """Returns how many Mosaic GPU kernels the program for a GPU launches."""
  return lower(fn, *args).count("@mosaic_gpu")


def tpu_kernel_calls(fn, *args):
  """Returns how many Pallas kernels the program for a TPU launches."""
  return lower_for_tpu(fn, *args).count("@tpu_custom_call(")


def _lower_on(fn, args, device, platform):
  mesh = AbstractMesh(
    (1,), ("x",), axis_types=(AxisType.Auto,), abstract_device=device
  )
  with jax.sharding.use_abstract_mesh(mesh):
    # A new function each time, so that dispatch is traced anew.
    traced = jax.jit(lambda *a: fn(*a)).trace(*args)
    return traced.lower(lowering_platforms=(platform,)).as_text()
