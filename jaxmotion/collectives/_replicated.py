"""Updates of data-parallel steps, and checks of what they are given."""

from collections.abc import Sequence
from typing import Any

import jax
import optax

from jaxmotion import core, program
from jaxmotion.core import AxisName, PyTree

_LINE_SEARCHES = (
  optax.ScaleByBacktrackingLinesearchState,
  optax.ScaleByZoomLinesearchState,
)


def update_params(
  tx: optax.GradientTransformation,
  grads: PyTree,
  opt_state: PyTree,
  params: PyTree,
  extra_args: dict[str, Any],
  axis_name: AxisName,
  loss: Any = None,
) -> tuple[PyTree, PyTree]:
  """Runs a chain on own gradients; raises unless all workers' results agree."""
  # grads: this worker's own. loss: the workers' mean, or None.
  _check_line_search(opt_state)
  update = optax.with_extra_args_support(tx).update
  if loss is not None:
    extra_args = {"value": loss} | extra_args

  def run(grads: PyTree, opt_state: PyTree, params: PyTree) -> PyTree:
    return update(grads, opt_state, params, **extra_args)

  args = (grads, opt_state, params)
  try:
    results = run(*args)
  except TypeError as error:
    # It may be that of a transformation that needs others, or refuses these.
    given = ", ".join(f"`{name}`" for name in extra_args) or "none"
    error.add_note(
      f"The chain was given these extra arguments: {given}. It gets others by "
      "`step(..., name=)`, as values that all workers share. A transformation "
      "that refuses unknown ones, such as `optax.contrib.sam`, goes into the "
      "chain as `optax.GradientTransformation(*tx)`."
    )
    raise
  # Updates that are typed as varying over workers, and depend on nothing that
  # varies, count as equal: `optax.set_to_zero` makes such zeros of gradients.
  updates, opt_state = _type_equal(run, args, results, axis_name)
  params = optax.apply_updates(params, updates)
  check_exchanged(params, opt_state, axis_name)
  return params, opt_state


def _check_line_search(opt_state: PyTree) -> None:
  """Raises if a chain evaluates the loss, and exchanges, several times."""
  if core.find_nodes(opt_state, _LINE_SEARCHES):
    raise TypeError(
      "`tx` must be without a line search, got one: it would evaluate the loss "
      "and exchange gradients several times a step. Use a learning rate, such "
      "as optax.lbfgs(0.1, linesearch=None)."
    )


def _type_equal(
  run: Any, args: PyTree, results: PyTree, axis_name: AxisName
) -> PyTree:
  """Types results as equal on all workers if nothing they read varies."""
  leaves, treedef = jax.tree.flatten(results, is_leaf=core.is_marked)
  typed = [
    i
    for i, x in enumerate(leaves)
    if not core.is_marked(x) and core.is_varying(x, axis_name)
  ]
  if not typed:
    return results

  def run_typed(*args: PyTree) -> list[Any]:
    outputs = jax.tree.leaves(run(*args), is_leaf=core.is_marked)
    return [outputs[i] for i in typed]

  closed = jax.make_jaxpr(run_typed)(*args)
  jaxpr = closed.jaxpr
  # What the update closes over may vary as well.
  invars = [*jaxpr.constvars, *jaxpr.invars]
  inputs = [core.varying_axes(x) for x in (*closed.consts, *closed.in_avals)]
  varying = program.find_varying(
    jaxpr.replace(invars=invars, constvars=[]),
    inputs,
    frozenset(core.axis_names(axis_name)),
  )
  for i, axes in zip(typed, varying, strict=True):
    if not axes:
      leaves[i] = core.assert_replicated(leaves[i], axis_name)
  return jax.tree.unflatten(treedef, leaves)


def check_exchanged(
  params: PyTree, opt_state: PyTree, axis_name: AxisName
) -> None:
  """Raises if an update left workers with different parameters or state."""
  # Types record whether they may differ. State that is marked as `PerWorker` or
  # `Split` is meant to.
  remedies = (
    "Freeze a parameter by optax.partition, with optax.set_to_zero() for its "
    "label",
    "Wrap a transformation that has state of its own before the exchange by "
    "jaxmotion.per_worker",
  )
  trees = (("params", params), ("opt_state", opt_state))
  for (name, tree), remedy in zip(trees, remedies, strict=True):
    for key_path, leaf in jax.tree.leaves_with_path(
      tree, is_leaf=core.is_marked
    ):
      if not core.is_marked(leaf) and core.is_varying(leaf, axis_name):
        path = "/".join(filter(None, (name, core.leaf_path(key_path))))
        raise ValueError(
          "`tx` must exchange gradients over all of "
          f"{core.axis_names(axis_name)} before they are used, got `{path}` "
          "that differs between workers: begin the chain with "
          f"jaxmotion.exchange(axis_name, codec). {remedy}."
        )


def check_rows(state: PyTree, rows: Sequence[int]) -> None:
  """Raises unless per-worker state is of as many workers as there are."""
  # rows: lengths that a leading axis of workers may have; first their number.

  def fits(node: Any, shapes: list[tuple[int, ...]]) -> list[bool]:
    if isinstance(node, core.PerWorker):
      return [bool(shape) and shape[0] in rows for shape in shapes]
    return [
      dimension is None or shape[dimension] % rows[0] == 0
      for shape, dimension in zip(shapes, node.dimensions, strict=True)
    ]

  for path, node in jax.tree.leaves_with_path(state, is_leaf=core.is_marked):
    if not core.is_marked(node):
      continue
    # What is `Shared` is there once, whatever the number of workers.
    node = core.drop_shared(node) if isinstance(node, core.PerWorker) else node
    named = core.named_leaves(node)
    shapes = [jax.numpy.shape(x) for _, x in named]
    for (inner, _), shape, is_fit in zip(
      named, shapes, fits(node, shapes), strict=True
    ):
      if not is_fit:
        name = "/".join(filter(None, (core.leaf_path(path), inner)))
        raise ValueError(
          f"`opt_state` must be of the {rows[0]} workers of the mesh, got "
          f"`{name}` of shape {shape}: continue a state of other workers by "
          "`jaxmotion.checkpoint.resize`."
        )
