"""Parameters of a training state, whatever scheme trains it."""

from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec as P

from jaxmotion import core
from jaxmotion.core import Array, PyTree
from jaxmotion.transforms import _states
from jaxmotion.transforms.parts import _fully_sharded_plan, _shard_layout
from jaxmotion.transforms.step import _scheme


def read_params(state: _scheme.TrainState) -> PyTree:
  """Returns the parameters of a training state, to evaluate and to save.

  They are `state.params`, but for leaves that `fully_sharded` pads because the
  workers do not divide them. Such a leaf loses its padding, and each device
  gets the workers' dimension of it whole. Give what was read to `init` to
  continue on another number of workers. Of several processes, all have to call
  the function.

  Args:
    state: what `init` or `step` returned, also inside of `jit`.

  Returns:
    The tree that `init` was given, with the shapes and dtypes that it had.

  Raises:
    TypeError: `state` is no `TrainState`.
    ValueError: parameters have other shapes than their optimizer state says.

  Example:
    >>> import optax
    >>> from jaxmotion import transforms
    >>> mesh = jax.sharding.Mesh(jax.devices()[:1], ("data",))
    >>> init, step = transforms.make_train_step(
    ...   lambda w, x: jnp.mean((x @ transforms.gather_params(w)) ** 2),
    ...   transforms.fully_sharded(optax.adam(1e-3)),
    ...   mesh,
    ... )
    >>> state = init(jnp.ones((33, 1023)))
    >>> read_params(state).shape
    (33, 1023)
  """
  core.check_instance(
    "state", state, _scheme.TrainState, "what `init` or `step` returned"
  )
  held = state.opt_state
  if not isinstance(held, _states.FullyShardedState):
    return state.params
  cuts = held.made_for.cuts
  _fully_sharded_plan.check_padded(state.params, cuts)
  return _shard_layout.map_cuts(_trim_leaf, state.params, cuts)


def _trim_leaf(cut: _shard_layout.LeafCut, x: Any) -> Array:
  """Returns a leaf without padding."""
  if cut.dimension is None or not cut.is_padded:
    return x
  # Explicit axes refuse a slice that they do not divide.
  sharding = jax.typeof(x).sharding
  entries = list(sharding.spec)
  if cut.dimension < len(entries) and entries[cut.dimension] is not None:
    entries[cut.dimension] = None
    x = jax.sharding.reshard(x, NamedSharding(sharding.mesh, P(*entries)))
  return cut.trim_leaf(jnp.asarray(x))
