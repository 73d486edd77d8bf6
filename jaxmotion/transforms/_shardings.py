"""Shardings of a training state over workers and over axes of the model."""

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec as P

from jaxmotion import core
from jaxmotion.core import AxisName, PyTree
from jaxmotion.transforms import _model_axes


class Shardings:
  """Places trees on a mesh, as its maps over workers expect and keep them."""

  def __init__(
    self, mesh: Mesh | AbstractMesh, axis_name: AxisName, specs: PyTree | None
  ):
    # mesh: one without devices places nothing. specs: how parameters are
    # sharded over the other axes, a prefix of their tree.
    _model_axes.check_specs(specs, axis_name)
    self._mesh, self._axis_name = mesh, axis_name
    self._workers = core.axis_names(axis_name)
    shape = dict(mesh.shape)
    self.specs = _model_axes.drop_single_axes(specs, shape)
    self._sizes = {n: shape[n] for n in shape if n not in self._workers}
    # Without specs, maps are over all axes of the mesh and parameters are
    # replicated. With them, maps are over the workers' axes only, and the other
    # axes are the partitioner's.
    self.map_options: dict[str, Any] = {"mesh": mesh}
    self._model_names: tuple[Any, ...] = ()
    if specs is not None:
      self.map_options["axis_names"] = set(self._workers)
      self._model_names = tuple(n for n, k in self._sizes.items() if k > 1)

  def check_params(self, params: PyTree) -> None:
    """Raises if parameters are sharded over an axis that no spec names."""
    # They would be replicated without a word.
    if self.specs is not None:
      self.params(params)
      return
    for path, leaf in core.named_leaves(params):
      sharding = getattr(leaf, "sharding", None)
      if not isinstance(sharding, NamedSharding):
        continue
      shape = dict(sharding.mesh.shape)
      others = _model_axes.sharded_axes(sharding.spec) - set(self._workers)
      if any(shape[name] > 1 for name in others):
        raise ValueError(
          "`specs` must say how parameters are sharded over axes of the model, "
          f"got None for {'/'.join(filter(None, ('params', path)))} of "
          f"{sharding.spec}: give them to `make_train_step`, `init_state` or "
          "`bind_mesh`."
        )

  def params(self, params: PyTree) -> PyTree:
    """Returns the specs of parameters, a prefix of their tree."""
    if self.specs is None:
      return P()
    return _model_axes.expand_specs(self.specs, params, self._sizes)

  def model(self, params: PyTree) -> _model_axes.ModelAxes:
    """Returns the axes of the model, and the spec of every parameter."""
    specs = _model_axes.spread_specs(self.params(params), params)
    return _model_axes.ModelAxes(self._model_names, specs)

  def grads(self, params: PyTree) -> PyTree:
    """Returns the specs of gradients with a leading axis of workers."""
    return jax.tree.map(
      lambda spec: P(self._axis_name, *spec), self.params(params)
    )

  def state(self, opt_state: PyTree, params: PyTree) -> PyTree:
    """Returns the specs of an optimizer's state, a prefix of its tree."""
    if self.specs is None:
      return core.state_specs(opt_state, self._axis_name)
    # A leaf is sharded like the parameter whose path ends its own, if the shape
    # is the same: moments and averages are.
    likes = {
      (path, jnp.shape(leaf)): spec
      for (path, leaf), spec in zip(
        jax.tree.leaves_with_path(params),
        jax.tree.leaves(self.params(params)),
        strict=True,
      )
    }
    names = (*self._workers, *self._model_names)
    rows = math.prod(self._mesh.shape[name] for name in names)

    def spec_of(path: Any, shape: tuple[int, ...]) -> P:
      ends = [(path[start:], shape) for start in range(len(path) + 1)]
      return next((likes[end] for end in ends if end in likes), P())

    def place_node(path: Any, node: Any) -> Any:
      if isinstance(node, core.Split):  # Its parts are the workers'.
        return node.specs()
      if not isinstance(node, core.PerWorker):
        return spec_of(path, node.shape)

      def place_own(inner: Any, leaf: Any) -> Any:
        if isinstance(leaf, core.Shared):
          others = tuple(n for n in names if n not in leaf.axes)
          return jax.tree.map(lambda _: P(others or None), leaf)
        # One row for each device: the exchange's. Else one for each worker.
        if self._model_names and leaf.shape[0] == rows:
          return P(names)
        return P(self._axis_name, *spec_of(inner, leaf.shape[1:]))

      return jax.tree.map_with_path(
        place_own, node, is_leaf=lambda leaf: isinstance(leaf, core.Shared)
      )

    return jax.tree.map_with_path(
      place_node,
      opt_state,
      is_leaf=lambda node: isinstance(node, core.PerWorker | core.Split),
    )

  def place(self, tree: PyTree, specs: PyTree) -> PyTree:
    """Gives arrays, inside of a jitted function, the shardings of specs."""
    # specs: a prefix of the tree.
    tree = core.place_tree(tree, self._mesh, specs)
    if self.specs is None or self._mesh.explicit_axes:
      return tree
    shardings = jax.tree.map(lambda s: NamedSharding(self._mesh, s), specs)
    return jax.lax.with_sharding_constraint(tree, shardings)
