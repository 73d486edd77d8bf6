"""Optimizer whose state can be made outside of a map over workers."""

from typing import Any

import optax
from jax.sharding import Mesh

from jaxmotion import core
from jaxmotion.core import AxisName, PyTree
from jaxmotion.transforms import _init_state, _model_axes, _placement


def bind_mesh(
  tx: optax.GradientTransformation,
  mesh: Mesh,
  *,
  axis_name: AxisName = "data",
  specs: PyTree | None = None,
) -> optax.GradientTransformationExtraArgs:
  """Lets an optimizer with per-worker state be initialized anywhere.

  The state of `codecs.feedback` differs between workers, so that `init` needs
  to know them. `flax.training.train_state.TrainState.create`,
  `flax.nnx.Optimizer` and scripts call it where no axis is bound. There,
  `init` of the result does what `transforms.init_state` does. Inside of
  `shard_map` or `pmap` it is that of `tx`.

  Args:
    tx: optax chain with an `exchange` over `axis_name`.
    mesh: device mesh that has the axis.
    axis_name: the axis (or axes) of the workers.
    specs: how parameters are sharded over other axes of the mesh;
      None: they are not.

  Returns:
    A transformation with the `update` of `tx`.

  Raises:
    TypeError: an argument of another type.
    ValueError: the mesh has no such axis.

  Example:
    >>> from jaxmotion import codecs, transforms
    >>> mesh = jax.sharding.Mesh(jax.devices()[:1], ("data",))
    >>> codec = codecs.feedback(codecs.sign())
    >>> tx = optax.chain(transforms.exchange("data", codec), optax.sgd(0.1))
    >>> state = bind_mesh(tx, mesh).init({"w": jnp.zeros(3)})
    >>> int(state[0].count)
    0
  """
  tx = _placement.as_transformation(tx)
  axis_name = _init_state.check_mesh(mesh, axis_name)
  _model_axes.check_specs(specs, axis_name)

  def init_fn(params: PyTree) -> PyTree:
    if core.axis_is_bound(axis_name):
      return tx.init(params)
    return _init_state.init_state(
      tx, params, mesh, axis_name=axis_name, specs=specs
    )

  update: Any = optax.with_extra_args_support(tx).update
  return optax.GradientTransformationExtraArgs(init_fn, update)
