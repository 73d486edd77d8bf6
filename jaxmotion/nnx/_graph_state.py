"""Leaves of the state of modules, optimizers and metrics."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
from flax import nnx
from jax.sharding import PartitionSpec as P

from jaxmotion import core
from jaxmotion.core import AxisName, PyTree
from jaxmotion.transforms import extend


class GraphLeaf(NamedTuple):
  """One array of the state of several graph nodes.

  Attributes:
    path: of its variable, for messages.
    kind: type of its variable, or None.
    spec: how it is split over workers; P() if all have the same.
    metric: path and class of the metric that it belongs to, or None.
  """

  path: str
  kind: type | None
  spec: P
  metric: tuple[str, type | None] | None


def describe_state(
  nodes: PyTree, state: Any, axis_name: AxisName
) -> tuple[GraphLeaf, ...]:
  """Describes the leaves of a state, in the order of its tree."""
  found: dict[Any, type] = {}
  cut: dict[Any, P] = {}
  equal: dict[Any, tuple[str, ...]] = {}
  for path, node in nnx.iter_graph(nodes):
    found[path] = type(node)
    if isinstance(node, core.Split):
      cut |= _cut_specs(path, node)
    if isinstance(node, core.Shared):
      equal[path] = node.axes
  variables, _ = jax.tree.flatten_with_path(
    state, is_leaf=lambda node: isinstance(node, nnx.Variable)
  )
  leaves: list[GraphLeaf] = []
  for key_path, variable in variables:
    path = tuple(_key_value(key) for key in key_path)
    above = [found.get(path[:i]) for i in range(len(path))]
    same = {name for i in range(len(path)) for name in equal.get(path[:i], ())}
    own = tuple(name for name in core.axis_names(axis_name) if name not in same)
    spec = cut.get(path, P())
    if core.PerWorker in above:
      spec = P(own if same else axis_name) if own else P()
    metric = None
    if isinstance(variable, nnx.metrics.MetricState):
      metric = "/".join(map(str, path[:-1])), above[-1]
    kind = type(variable) if isinstance(variable, nnx.Variable) else None
    leaf = GraphLeaf("/".join(map(str, path)), kind, spec, metric)
    leaves += [leaf] * len(jax.tree.leaves(variable))
  return tuple(leaves)


def _cut_specs(path: tuple[Any, ...], node: core.Split) -> dict[Any, P]:
  """Returns the spec of every array below a node that workers cut."""
  below, _ = jax.tree.flatten_with_path(
    node, is_leaf=lambda x: isinstance(x, nnx.Variable)
  )
  specs = node.specs(node.axes).value
  leaves = jax.tree.leaves(specs, is_leaf=lambda x: isinstance(x, P))
  return {
    (*path, *map(_key_value, keys)): spec
    for (keys, _), spec in zip(below, leaves, strict=True)
  }


def _key_value(key: Any) -> Any:
  """Returns the attribute, item or index of one step of a path."""
  for name in ("key", "name", "idx"):
    if hasattr(key, name):
      return getattr(key, name)
  return key


def join_state(
  leaves: Sequence[GraphLeaf],
  shapes: Sequence[Any],
  differs: Sequence[bool],
  axis_name: AxisName,
  averaged: tuple[type, ...],
) -> list[extend.Join]:
  """Says how the new state of the workers is joined."""
  summed = [
    leaf.metric
    for leaf, differ in zip(leaves, differs, strict=True)
    if differ and leaf.metric is not None
  ]
  for path, kind in summed:
    if kind is None or not issubclass(kind, nnx.metrics.Average):
      raise TypeError(
        f"`{path}` must be an nnx.metrics.Average or Accuracy, got {kind}: "
        "sums of its state over workers mean nothing. Update it after the step."
      )
  return [
    "sum"
    if leaf.metric in summed and leaf.spec == P()
    else extend.join_name(
      x,
      leaf.spec,
      differ,
      leaf.path,
      axis_name,
      mean=leaf.kind is not None and issubclass(leaf.kind, averaged),
    )
    for leaf, x, differ in zip(leaves, shapes, differs, strict=True)
  ]
