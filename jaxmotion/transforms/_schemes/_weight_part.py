"""Weights of which a worker has a part, gathered where they are used."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec

from jaxmotion import codecs, collectives, core
from jaxmotion.collectives.extend import HOST_WEIGHTS, PACKED_WEIGHTS
from jaxmotion.core import Array, AxisName, PyTree


class GradientGuard(NamedTuple):
  """Arrays that act on the gradient of one leaf."""

  # float32[], factor of this worker's gradient in the mean. A factor of 0 drops
  # the gradient, even if it is not finite.
  factor: Array | None
  # float32[], a zero whose own gradient is NaN if the leaf's is not finite.
  flag: Array | None


def guard_gradient(x: Array, guard: GradientGuard, nonfinite: str) -> Array:
  """Returns `x`, whose gradient a guard drops, checks and scales."""
  # nonfinite: "zero" replaces elements that are not finite by zero.
  bare = guard.factor is None and guard.flag is None
  if bare and nonfinite != "zero":
    return x
  return _guard(nonfinite, x, guard)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _guard(nonfinite: str, x: Array, guard: GradientGuard) -> Array:
  return x


def _guard_backward(
  nonfinite: str, guard: GradientGuard, ct: Array
) -> tuple[Array, Any]:
  """Drops, checks and scales a gradient, as `guard_gradient` says."""
  # The gradient of the flag is what the check has found.
  factor = guard.factor
  if factor is not None:
    ct = jnp.where(factor == 0, 0, ct)
  finite = jnp.isfinite(ct)
  flag = None
  if guard.flag is not None:
    flag = jnp.where(finite.all(), 0.0, jnp.nan).astype(guard.flag.dtype)
  if nonfinite == "zero":
    ct = jnp.where(finite, ct, 0)
  if factor is not None:
    wide = jnp.promote_types(ct.dtype, factor.dtype)
    ct = (ct.astype(wide) * factor.astype(wide)).astype(ct.dtype)
    factor = jnp.zeros_like(factor)
  return ct, GradientGuard(factor, flag)


_guard.defvjp(lambda nonfinite, x, guard: (x, guard), _guard_backward)


class GatherOptions(NamedTuple):
  """Axis and codecs of the gathers of one leaf."""

  axis_name: AxisName
  # Dimension that is cut, counted from the last: a loop over layers may take
  # the first away.
  dimension: int
  weight_codec: codecs.Codec | None
  gradient_codec: codecs.Codec | None
  local_codec: codecs.Codec | None = None  # Of gradients within a host.
  regather: bool | str = True
  nonfinite: str = "propagate"
  # How the whole leaf is sharded over axes of the model, by dimension.
  spec: PartitionSpec | None = None
  # Length of the whole weights along `dimension`, if parts are padded.
  length: int | None = None


GATHERED = "jaxmotion/gathered"
"""Name of whole weights, which no policy saves."""

# Names of the words that are saved, and so not gathered again.
_SAVED: dict[bool | str, tuple[str, ...]] = {
  True: (),
  False: (PACKED_WEIGHTS,),
  "local": (HOST_WEIGHTS,),
}


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class WeightPart:
  """One worker's part of a leaf of the parameters, as a loss function gets it.

  `gather_params` makes whole weights of a tree of them. A `lax.scan` over
  stacked layers slices them like arrays.
  """

  value: Array
  error: Array | None  # Error memory of the gradient of the whole leaf.
  key: core.Key | None
  guard: GradientGuard  # What is done to the gradient before it is encoded.
  options: GatherOptions = dataclasses.field(metadata={"static": True})

  def gather_whole(self) -> Array:
    """Gathers the whole weights; its gradient is reduced, guarded and cut."""
    options, spec = self.options, self.options.spec
    if spec is not None:
      # A loop over layers may have taken the first dimension away.
      spec = PartitionSpec(*spec[len(spec) - self.value.ndim :])
    whole = collectives.unshard(
      self.value,
      options.axis_name,
      options.weight_codec,
      options.gradient_codec,
      axis=options.dimension,
      error=self.error,
      key=self.key,
      local_codec=options.local_codec,
      spec=spec,
    )
    if options.length is not None:
      whole = lax.slice_in_dim(whole, 0, options.length, axis=options.dimension)
    whole = guard_gradient(whole, self.guard, options.nonfinite)
    # A trace tells by the name what was gathered, and so does not differ.
    return checkpoint_name(whole, GATHERED)


@core.declare(params=core.arrays)
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
  is_part = lambda node: isinstance(node, WeightPart)
  return jax.tree.map(
    lambda node: node.gather_whole() if is_part(node) else node,
    params,
    is_leaf=is_part,
  )


@core.declare(block=core.function, regather=core.choice((None, *_SAVED)))
def gather_block(
  block: Callable[..., Any], *, regather: bool | str | None = None
) -> Callable[..., Any]:
  """Returns a block that gathers its weights and does not save them.

  The backward pass computes the block again. So the memory holds whole weights
  of the blocks at work alone, and activations between blocks.

  Args:
    block: (params, *args) -> result, of whole parameters.
    regather: what the backward pass gathers again, in place of the `regather`
      that `fully_sharded` was given; None takes that one.

  Returns:
    A function like `block`, of parameters with `WeightPart` leaves.

  Raises:
    TypeError: an argument of another type.
    ValueError: another `regather`. The block raises it for "local" if the step
      has no `HostAxes`.

  Example:
    >>> import jax.numpy as jnp
    >>> block = gather_block(lambda params, x: jnp.tanh(x @ params["w"]))
    >>> block({"w": jnp.ones((3, 3))}, jnp.ones((2, 3))).shape
    (2, 3)
  """
  run_block = lambda params, *args: block(gather_params(params), *args)

  def run_again(params: PyTree, *args: Any) -> Any:
    """Runs the block so that the backward pass gathers and computes again."""
    saved: tuple[str, ...] = ()
    for part in core.find_nodes(params, WeightPart):
      # One step gives all leaves the same `regather`.
      again = part.options.regather if regather is None else regather
      check_regather(again, part.options.axis_name)
      saved = _SAVED[again]
    policy = jax.checkpoint_policies.save_only_these_names(*saved)
    return jax.checkpoint(run_block, policy=policy)(params, *args)

  return run_again


def check_regather(regather: Any, axis_name: AxisName) -> None:
  """Raises if "local" is to be gathered where axes name no hosts."""
  if regather == "local" and not isinstance(axis_name, core.HostAxes):
    raise ValueError(
      "`regather` must be True or False without hosts, got 'local': give "
      '`make_train_step` axis_name=jaxmotion.HostAxes("host", "device").'
    )
