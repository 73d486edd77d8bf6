"""Microscaling (OCP MX): narrow floats under a shared power of two."""

from jaxmotion.kernels.microscaling._op import (
  FORMATS as FORMATS,
  MicroscalingOp as MicroscalingOp,
)
