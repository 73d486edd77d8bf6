"""Makers of states, and the shapes of what they make."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import optax
from jax.sharding import AbstractMesh, Mesh

from jaxmotion import core
from jaxmotion.core import AxisName, PyTree
from jaxmotion.transforms import _init_state, _shardings

_NAME = "state_maker"


class StateMaker(NamedTuple):
  """Function that makes one worker's state, wherever the axis is bound.

  Attributes:
    init: parameters, whole on every worker -> one worker's state.
    divide: parameters -> `Fragments`, of `local_updates`; otherwise None.
  """

  init: Callable[[PyTree], PyTree]
  divide: Callable[[PyTree], Any] | None = None

  def attach(self, init: Callable[..., Any]) -> Callable[..., Any]:
    """Returns the `init` of a step, which `find_maker` finds this in."""
    setattr(init, _NAME, self)
    return init


def find_maker(
  tx: optax.GradientTransformation | Callable[..., Any],
) -> StateMaker:
  """Returns the function that makes one worker's state inside of a map."""
  # tx: optax chain, or the `init` of a step that makes its own state.
  maker = getattr(tx, _NAME, None)
  if isinstance(maker, StateMaker):
    return maker
  core.check_instance(
    "tx",
    tx,
    optax.GradientTransformation,
    "an optax transformation, or the `init` of a training step",
  )
  chain: Any = tx
  return StateMaker(chain.init)


def trace_state(
  tx: optax.GradientTransformation | Callable[..., Any],
  params: PyTree,
  mesh: Mesh | AbstractMesh,
  axis_name: AxisName,
  specs: PyTree | None = None,
) -> PyTree:
  """Returns the shapes of a state, whose per-worker leaves have rows."""
  # tx: optax chain, or the `init` that `make_train_step` returned. mesh: one
  # without devices will do, to ask about other numbers of workers.
  init_whole = find_maker(tx).init
  core.check_arrays("params", params, numbers=False)
  core.check_instance(
    "mesh", mesh, (Mesh, AbstractMesh), "a mesh of jax.sharding"
  )
  axis_name = _init_state.check_axes(mesh, axis_name)
  params = jax.tree.map(core.shape_dtype, params)
  shardings = _shardings.Shardings(mesh, axis_name, specs)

  def make(params: PyTree) -> PyTree:
    placed = shardings.place(params, shardings.params(params))
    return _init_state.map_init(init_whole, placed, axis_name, shardings)

  with core.without_context_mesh():
    return jax.tree.map(core.shape_dtype, jax.eval_shape(make, params))
