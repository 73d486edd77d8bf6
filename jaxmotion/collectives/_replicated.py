"""Checks of what a data-parallel step keeps and of what it is given."""

import math

import jax
from jax.sharding import Mesh

from jaxmotion.core import (
  AxisName,
  PerWorker,
  PyTree,
  axis_names,
  is_varying,
  leaf_path,
  named_leaves,
)


def check_exchanged(
  params: PyTree, opt_state: PyTree, axis_name: AxisName
) -> None:
  """Raises if an update left parameters or state that differ between workers.

  Types record whether they may differ. State that is marked as `PerWorker` is
  meant to.

  Args:
    params: parameters after the update.
    opt_state: state after the update.
    axis_name: the workers' axis.

  Raises:
    ValueError: a leaf varies over the axis; it is named by its path.
  """
  named = [("params", params), ("opt_state", opt_state)]
  for name, tree in named:
    leaves = jax.tree_util.tree_leaves_with_path(
      tree, is_leaf=lambda node: isinstance(node, PerWorker)
    )
    for key_path, leaf in leaves:
      if not isinstance(leaf, PerWorker) and is_varying(leaf, axis_name):
        path = "/".join(filter(None, (name, leaf_path(key_path))))
        raise ValueError(
          "`tx` must exchange gradients over all of "
          f"{axis_names(axis_name)} before they are used, got `{path}` that "
          "differs between workers: begin the chain with "
          "jaxmotion.exchange(axis_name, codec)."
        )


def check_batch(
  batch: PyTree, mesh: Mesh, axis_name: AxisName, microbatches: int = 1
) -> None:
  """Raises unless the workers divide the leading axis of every leaf.

  Args:
    batch: pytree of arrays.
    mesh: device mesh that has the axis.
    axis_name: the workers' axis.
    microbatches: number of parts that divide a worker's examples.

  Raises:
    ValueError: a leaf has no such axis; it is named by its path.
  """
  workers = math.prod(mesh.shape[name] for name in axis_names(axis_name))
  for path, leaf in named_leaves(batch):
    shape = jax.numpy.shape(leaf)
    at = f" at `{path}`" if path else ""
    if not shape or shape[0] % workers:
      raise ValueError(
        "`batch` must have leaves with a leading axis of examples that "
        f"{workers} workers divide, got shape {shape}{at}: drop or pad the "
        "last examples."
      )
    own = shape[0] // workers
    if own % microbatches:
      raise ValueError(
        f"`microbatches` must divide the {own} examples of a worker, got "
        f"{microbatches} for a batch of shape {shape}{at}."
      )
