"""Microscaling (OCP MX): narrow floats under a shared power of two."""

from jaxmotion.kernels.microscaling._op import MicroscalingOp as MicroscalingOp
from jaxmotion.kernels.microscaling._reference import (
  FORMATS as FORMATS,
  Format as Format,
  Scaled as Scaled,
  mx_decode as mx_decode,
  mx_encode as mx_encode,
)
