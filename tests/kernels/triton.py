"""Lowering kernels for GPUs that are not there."""

import jax
from jax.sharding import AbstractDevice, AbstractMesh, AxisType

GPUS = ("NVIDIA H200", "NVIDIA A100-SXM4-80GB")
_CALL = "@__gpu$xla.gpu.triton("


def lower(fn, *args, gpu="NVIDIA H200"):
  """The program of `fn` for that GPU, as text."""
  device = AbstractDevice(device_kind=gpu, num_cores=None, platform="gpu")
  mesh = AbstractMesh(
    (1,), ("x",), axis_types=(AxisType.Auto,), abstract_device=device
  )
  with jax.sharding.use_abstract_mesh(mesh):
    # A function of its own: what chose an implementation is traced anew.
    traced = jax.jit(lambda *a: fn(*a)).trace(*args)
    return traced.lower(lowering_platforms=("cuda",)).as_text()


def kernel_calls(fn, *args, gpu="NVIDIA H200"):
  """How many Triton kernels the program for that GPU launches."""
  return lower(fn, *args, gpu=gpu).count(_CALL)
