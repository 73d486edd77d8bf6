"""Type names that all rooms share."""

from collections.abc import Hashable
from typing import Any, TypeAlias

import jax

Array: TypeAlias = jax.Array
# An array or a jax.ShapeDtypeStruct: only `.shape` and `.dtype` are read.
ShapedLike: TypeAlias = Any
PyTree: TypeAlias = Any
# One mesh (or pmap) axis, or several that are exchanged over together.
AxisName: TypeAlias = Hashable | tuple[Hashable, ...]


def shape_dtype(x: Any) -> jax.ShapeDtypeStruct:
  """Returns the shape and dtype of `x`, without its data."""
  return jax.ShapeDtypeStruct(x.shape, x.dtype)
