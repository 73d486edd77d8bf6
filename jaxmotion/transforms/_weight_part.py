"""Weights of which a worker has a part, gathered where they are used."""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax

from jaxmotion.codecs import Codec
from jaxmotion.collectives import unshard
from jaxmotion.collectives.extend import PACKED_WEIGHTS
from jaxmotion.core import (
  Array,
  AxisName,
  Key,
  PyTree,
  check_arrays,
  check_bool,
  check_callable,
)


class GatherOptions(NamedTuple):
  """Axis and codecs of the gathers of one leaf.

  Attributes:
    axis_name: the workers' axis.
    dimension: dimension that is cut, counted from the last: a loop over layers
      may take the first away.
    weight_codec: codec of the weights, or None.
    gradient_codec: codec of their gradient, or None.
  """

  axis_name: AxisName
  dimension: int
  weight_codec: Codec | None
  gradient_codec: Codec | None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class WeightPart:
  """One worker's part of a leaf of the parameters, as a loss function gets it.

  `gather_params` makes whole weights of a tree of them. A `lax.scan` over
  stacked layers slices them like arrays.

  Attributes:
    value: the part.
    error: error memory of the gradient of the whole leaf, or None.
    key: randomness of the codecs, or None.
    options: axis and codecs.
  """

  value: Array
  error: Array | None
  key: Key | None
  options: GatherOptions = dataclasses.field(metadata={"static": True})

  def gather_whole(self) -> Array:
    """Returns the whole weights, typed as varying."""
    options = self.options
    return unshard(
      self.value,
      options.axis_name,
      options.weight_codec,
      options.gradient_codec,
      axis=options.dimension,
      error=self.error,
      key=self.key,
    )


def gather_params(params: PyTree) -> PyTree:
  """Gathers whole weights from the parts of a tree.

  Call it in the loss function of `fully_sharded`, on the parameters of one
  block at a time.

  Args:
    params: tree with `WeightPart` leaves; other leaves stay as they are.

  Returns:
    The tree, with arrays.

  Example:
    >>> import jax.numpy as jnp
    >>> gather_params({"bias": jnp.zeros(3)})["bias"].shape
    (3,)
  """
  check_arrays("params", params)
  is_part = lambda node: isinstance(node, WeightPart)
  return jax.tree.map(
    lambda node: node.gather_whole() if is_part(node) else node,
    params,
    is_leaf=is_part,
  )


def gather_block(
  block: Callable[..., Any], *, regather: bool = True
) -> Callable[..., Any]:
  """Returns a block that gathers its weights and does not save them.

  The backward pass computes the block again. So the memory holds whole weights
  of the blocks at work alone, and activations between blocks.

  Args:
    block: (params, *args) -> result, of whole parameters.
    regather: whether the backward pass gathers the weights again. False saves
      the words that were gathered: one gather less, but all blocks' words are
      in memory, of the size that the codec gives them.

  Returns:
    A function like `block`, of parameters with `WeightPart` leaves.

  Raises:
    TypeError: an argument of another type.

  Example:
    >>> import jax.numpy as jnp
    >>> block = gather_block(lambda params, x: jnp.tanh(x @ params["w"]))
    >>> block({"w": jnp.ones((3, 3))}, jnp.ones((2, 3))).shape
    (2, 3)
  """
  check_callable("block", block)
  check_bool("regather", regather)
  saved = () if regather else (PACKED_WEIGHTS,)

  def run_block(params: PyTree, *args: Any) -> Any:
    return block(gather_params(params), *args)

  policy = jax.checkpoint_policies.save_only_these_names(*saved)
  return jax.checkpoint(run_block, policy=policy)
