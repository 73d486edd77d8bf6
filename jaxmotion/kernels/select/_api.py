"""Public functions of top-k selection, which choose an implementation."""

import functools
from typing import Any

from jaxmotion import core
from jaxmotion.core import Array, ShapedLike
from jaxmotion.kernels import _block_layout, _checks, _dispatch
from jaxmotion.kernels.select import _pallas_triton, _reference

# XLA:GPU makes a loop of kernels of each value kept, and loads a sum's payloads
# for each element of the result.
_TABLE = {"reference": _reference, "pallas_triton": _pallas_triton}
_run = functools.partial(_dispatch.dispatch, _TABLE)
_PLANES = core.integer(1, 2**31 - 1)


@core.declare(x=core.float_array, planes=_PLANES)
def topk_select(
  x: Array, k: int, planes: int, *, implementation: str | None = None
) -> tuple[Array, Array]:
  """Selects the k elements of largest magnitude in every lane.

  The flat array is cut into planes, contiguous runs of one length, of whole
  rows if that costs little padding. A lane holds one element of each plane, all
  at the same offset in it. NaN counts as
  larger than infinity. Of equal magnitudes negative ones come first, then the
  one that stands first. Every implementation returns the same bits, except
  for those of a float16 NaN, which a GPU does not keep.

  Args:
    x: floating array of any shape, padded with zeros to whole planes.
    k: number of elements kept of each lane, at most `planes`.
    planes: number of planes, the length of a lane.
    implementation: name of the only implementation to try; None chooses one.

  Returns:
    values f32[k, lanes] and their planes uint32[k, lanes], with as many lanes
    as a plane has elements.

  Raises:
    ValueError: `k` or `planes` is out of range.

  Example:
    >>> import jax.numpy as jnp
    >>> values, places = topk_select(jnp.array([1.0, -3.0, 2.0, 0.5]), 1, 2)
    >>> values.tolist(), places.tolist()
    ([[2.0, -3.0]], [[1, 0]])
  """
  core.integer(1, planes)("k", k)
  return _run(
    "topk_select",
    x,
    implementation=implementation,
    k=k,
    planes=planes,
  )


@core.declare(values=core.float_array, like=core.float_array, planes=_PLANES)
def topk_scatter(
  values: Array,
  places: Array,
  like: ShapedLike,
  planes: int,
  *,
  implementation: str | None = None,
) -> Array:
  """Puts selected values back where they stood, with zeros elsewhere.

  Args:
    values: f32[k, lanes].
    places: unsigned words [k, lanes], all different within a lane. Of narrow
      ones a host reads fewer bytes for each element of the result.
    like: shape and dtype of the result.
    planes: number of planes, the length of a lane.
    implementation: name of the only implementation to try; None chooses one.

  Example:
    >>> import jax.numpy as jnp
    >>> values, places = jnp.array([[2.0, -3.0]]), jnp.array([[1, 0]])
    >>> topk_scatter(values, places.astype("uint32"), jnp.zeros(4), 2).tolist()
    [0.0, -3.0, 2.0, 0.0]
  """
  _check_selected(values, places, like, planes)
  return _run(
    "topk_scatter",
    values,
    places,
    implementation=implementation,
    like=like,
    planes=planes,
  )


@core.declare(values=core.float_array, like=core.float_array, planes=_PLANES)
def topk_sum(
  values: Array,
  places: Array,
  like: ShapedLike,
  planes: int,
  *,
  implementation: str | None = None,
) -> Array:
  """Scatters the selected values of several workers and adds them.

  Args:
    values: f32[workers, k, lanes].
    places: unsigned words [workers, k, lanes], all different within a worker's
      lane.
    like: shape and dtype of the array that each worker encoded.
    planes: number of planes, the length of a lane.
    implementation: name of the only implementation to try; None chooses one.

  Returns:
    The sum in the order of workers, in float32 or the wider dtype of `like`.

  Example:
    >>> import jax.numpy as jnp
    >>> values = jnp.array([[[2.0, -3.0]], [[1.0, 1.0]]])
    >>> places = jnp.array([[[1, 0]], [[0, 0]]], "uint32")
    >>> topk_sum(values, places, jnp.zeros(4), 2).tolist()
    [1.0, -2.0, 2.0, 0.0]
  """
  _check_selected(values, places, like, planes, "workers")
  return _run(
    "topk_sum",
    values,
    places,
    implementation=implementation,
    like=like,
    planes=planes,
  )


def _check_selected(
  values: Array, places: Any, like: ShapedLike, planes: int, *lead: str
) -> None:
  """Raises unless values and places are those that a selection returns."""
  lanes = _block_layout.plane_length(tuple(like.shape), planes)
  _checks.check_shape("values", values, (*lead, "k", lanes), "float")
  _checks.check_words("places", places, tuple(values.shape))
