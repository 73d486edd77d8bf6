"""Meshes of the first emulated devices."""

import math

import jax
import numpy as np
from jax.sharding import AxisType, Mesh


def mesh_of(*lengths, names=("data", "model"), kind=AxisType.Auto):
  """Returns a mesh whose axes have these lengths and the first names."""
  devices = np.array(jax.devices()[: math.prod(lengths)]).reshape(lengths)
  names = tuple(names)[: len(lengths)]
  return Mesh(devices, names, axis_types=(kind,) * len(names))
