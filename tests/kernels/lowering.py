"""Kernels on a host: interpreted, and lowered for devices that are absent."""

import functools
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractDevice, AbstractMesh, AxisType

from jaxmotion.kernels import _dispatch

GPUS = ("NVIDIA H200", "NVIDIA A100-SXM4-80GB")


def on_gpus(cases):
  """Returns (case, gpu): all cases on the first GPU, one on every other."""
  cases = list(cases)
  return [(c, GPUS[0]) for c in cases] + [(cases[0], g) for g in GPUS[1:]]


def interpret(fn):
  """Returns a function whose kernels run as `jax.numpy`."""

  @functools.wraps(fn)
  def run(*args, **static):
    with mock.patch.object(_dispatch, "INTERPRETS_KERNELS", True):
      return fn(*args, **static)

  return run


def check_kernel(triton, reference, op, *args, **static):
  """Asserts that a kernel returns the reference's bits, and returns them."""
  wanted, found = (
    jax.jit(functools.partial(fn, **static))(*args)
    for fn in (getattr(reference, op), interpret(getattr(triton, op)))
  )
  assert jax.tree.structure(wanted) == jax.tree.structure(found)
  for a, b in zip(jax.tree.leaves(wanted), jax.tree.leaves(found), strict=True):
    assert a.dtype == b.dtype and a.shape == b.shape
    np.testing.assert_array_equal(_bits(b), _bits(a))
  return wanted


def _bits(a):
  if a.dtype.itemsize == 2 and jnp.issubdtype(a.dtype, jnp.floating):
    # XLA:CPU does not keep those of a NaN in what it copies.
    a = np.array(a)
    with np.errstate(invalid="ignore"):
      a[np.isnan(a)] = np.nan
  return np.asarray(a).view(f"u{a.dtype.itemsize}")


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
