"""Decorator that runs a training step on modules on every worker."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh, PartitionSpec as P

from jaxmotion import core
from jaxmotion.core import AxisName, PyTree
from jaxmotion.transforms import extend


def _variable_type(name: str, value: Any) -> Any:
  """Returns a type of variables, or raises."""
  if isinstance(value, type) and issubclass(value, nnx.Variable):
    return value
  raise TypeError(f"`{name}` must be a type of variables, got {value!r}.")


@core.declare(mean=core.sequence("variable types", _variable_type))
def parallelize_step(
  mesh: Mesh,
  *,
  axis_name: AxisName = "data",
  batch: str | Sequence[str] = "batch",
  mean: Sequence[type] = (),
  static_argnames: str | Sequence[str] = (),
  static_argnums: int | Sequence[int] = (),
  donate_argnames: str | Sequence[str] = (),
  donate_argnums: int | Sequence[int] = (),
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
  """Makes a decorator that runs a training step on every worker's own batch.

  It takes the place of `nnx.jit`. Modules, optimizers and metrics are updated
  in place. `nnx.value_and_grad` gives a worker's own gradient, and an
  `exchange` in the optimizer averages the gradients:

  - arguments named by `batch` are split along their leading axis. All else is
    replicated, except `PerWorker` state of the optimizer.
  - `nnx.RngKey`: each worker draws from a stream of its own.
  - `nnx.BatchStat`: each worker updates its statistics, then the mean over
    workers is kept.
  - `nnx.metrics.Average`, `Accuracy` and `MultiMetric` of these: each worker
    adds its own examples, and the totals of all are kept.
  - other variables and results have to be equal on all workers, which is read
    from the traced step. Floating-point scalars that differ are averaged.

  Args:
    mesh: device mesh that has the axis; further axes are left to the step.
    axis_name: the axis (or axes) that the batch is split over.
    batch: name of the parameter of the step that is split, or several.
    mean: types of further variables that are averaged where they differ.
    static_argnames: names of parameters whose values the trace sees, such as
      `train`. The step is compiled for each value.
    static_argnums: positions of such parameters.
    donate_argnames: names of parameters, such as those of modules, optimizers
      and metrics, whose buffers are given to the results.
    donate_argnums: positions of such parameters.

  Returns:
    A decorator; what it returns is jitted. Parameters that a call leaves out
    have their defaults, which are not traced.

  Raises:
    TypeError: an argument of another type; a metric of another class that
      differs between workers.
    ValueError: the mesh has no such axis, or the step no such parameter. The
      step raises it for a variable or result that differs between workers, by
      its path, and for one that adds or removes variables.

  Example:
    >>> import jax.numpy as jnp
    >>> import optax
    >>> from jaxmotion import codecs, transforms
    >>> mesh = jax.sharding.Mesh(jax.devices()[:1], ("data",))
    >>> codec = codecs.feedback(codecs.uniform(bits=8))
    >>> tx = optax.chain(transforms.exchange("data", codec), optax.sgd(0.1))
    >>> model = nnx.Linear(2, 1, rngs=nnx.Rngs(0))
    >>> optimizer = nnx.Optimizer(
    ...   model, transforms.bind_mesh(tx, mesh), wrt=nnx.Param
    ... )
    >>> @parallelize_step(mesh)
    ... def train_step(model, optimizer, batch):
    ...   def loss_fn(model):
    ...     return jnp.mean((model(batch["x"]) - batch["y"]) ** 2)
    ...   loss, grads = nnx.value_and_grad(loss_fn)(model)
    ...   optimizer.update(model, grads)
    ...   return loss
    >>> batch = {"x": jnp.eye(2), "y": jnp.ones((2, 1))}
    >>> first, second = [train_step(model, optimizer, batch) for _ in range(2)]
    >>> bool(second < first)
    True
  """
  return extend.make_decorator(
    functools.partial(_map_step, averaged=(nnx.BatchStat, *mean)),
    mesh,
    axis_name,
    batch,
    static_argnames=static_argnames,
    static_argnums=static_argnums,
    donate_argnames=donate_argnames,
    donate_argnums=donate_argnums,
  )


def _map_step(
  fun: Callable[..., Any],
  parameters: extend.StepParameters,
  mesh: Mesh,
  axis_name: AxisName,
  *,
  averaged: tuple[type, ...],
) -> Callable[..., Any]:
  """Returns a step on modules that runs on every worker, jitted."""

  # `graph` is a tree without arrays, which JAX compares. As a static argument
  # it would be hashed, and attributes that are dicts and lists have no hash.
  @functools.partial(jax.jit, static_argnums=(1, 2), donate_argnums=(3,))
  def run_step(
    graph: Any,
    layout: tuple[Any, ...],
    static: extend.Static,
    donated: dict[int, Any],
    kept: dict[int, Any],
    given: PyTree,
  ) -> tuple[list[Any], PyTree]:
    """Returns new arrays of the modules, joined over workers, and results."""
    treedef, leaves = layout
    state = [(donated | kept)[i] for i in range(len(leaves))]
    specs = [leaf.spec for leaf in leaves]

    def run_local(state: list[Any], given: PyTree) -> PyTree:
      """Runs the step on one worker, with random keys of its own."""
      folded, restore_key = extend.fold_keys(
        {"state": state}, {"state": specs}, axis_name
      )
      nodes = nnx.merge(graph, jax.tree.unflatten(treedef, folded["state"]))
      results = parameters.call({**nodes, **given}, static)
      left, new_state = nnx.split(nodes)
      if left != graph:
        raise ValueError(
          "`fun` must keep the variables and static fields of its modules, got "
          "others after the step: call `model.train()` before it, and pop "
          "intermediates within."
        )
      # Of a metric, what the worker adds.
      new = [
        now - old if leaf.metric else restore_key(now)
        for leaf, old, now in zip(
          leaves, state, jax.tree.leaves(new_state), strict=True
        )
      ]
      return new, results

    given_specs = {
      name: extend.split_specs(name, arg, mesh, axis_name, optional=True)
      for name, arg in given.items()
    }
    new, results = extend.run_on_workers(
      run_local,
      mesh,
      axis_name,
      [state, given],
      [specs, given_specs],
      functools.partial(_choose_joins, leaves, axis_name, averaged),
    )
    new = [
      old + change if leaf.metric else change
      for leaf, old, change in zip(leaves, state, new, strict=True)
    ]
    return new, results

  calls = extend.StepCalls(mesh, has_static=True)

  def split_graph(args: Any, kwargs: Any) -> tuple[dict[str, Any], Any]:
    """Splits modules into a graph and arrays, which `run_step` takes."""
    arguments, static = parameters.bind(args, kwargs)
    given = {n: arguments.pop(n) for n in parameters.split if n in arguments}
    calls.check_arrays(given)
    # Flax would take numbers as static, and each value would compile.
    nodes = {
      name: jnp.asarray(x) if isinstance(x, bool | int | float) else x
      for name, x in arguments.items()
    }
    graph, state = nnx.split(nodes)
    leaves = _describe_state(nodes, state, axis_name)
    arrays, treedef = jax.tree.flatten(state)
    specs = [leaf.spec for leaf in leaves]
    placed = extend.place_arguments(arrays, mesh, specs, axis_name)
    kept = dict(enumerate(placed))
    donated = {
      i: kept.pop(i)
      for i, leaf in enumerate(leaves)
      if leaf.path.split("/")[0] in parameters.donated
    }
    return nodes, (graph, (treedef, leaves), static, donated, kept, given)

  @functools.wraps(fun)
  def step(*args: Any, **kwargs: Any) -> Any:
    """Runs the step on all workers, and updates the modules in place."""
    nodes, traced = split_graph(args, kwargs)
    _, (treedef, leaves), _, donated, kept, given = traced
    named = {leaves[i].path: x for i, x in (donated | kept).items()}
    with calls.guard(named | given, {leaves[i].path for i in donated}, given):
      new, results = run_step(*traced)
    calls.add(new)
    nnx.update(nodes, jax.tree.unflatten(treedef, new))
    return results

  extend.copy_methods(
    step, run_step, lambda args, kwargs: split_graph(args, kwargs)[1]
  )
  return step


class _GraphLeaf(NamedTuple):
  """One array of the state of several graph nodes."""

  path: str  # That of its variable, for messages.
  kind: type | None  # Type of its variable.
  spec: P  # How it is split over workers; P() if all have the same.
  # Path and class of the metric that it belongs to.
  metric: tuple[str, type | None] | None


def _describe_state(
  nodes: PyTree, state: Any, axis_name: AxisName
) -> tuple[_GraphLeaf, ...]:
  """Describes each array of the modules' state: its variable, spec, metric."""
  kinds: dict[Any, type] = {}
  cut: dict[Any, P] = {}
  equal: dict[Any, tuple[str, ...]] = {}
  for path, node in nnx.iter_graph(nodes):
    kinds[path] = type(node)
    if isinstance(node, core.Split):
      cut |= _cut_specs(path, node)
    if isinstance(node, core.Shared):
      equal[path] = node.axes
  variables, _ = jax.tree.flatten_with_path(
    state, is_leaf=lambda node: isinstance(node, nnx.Variable)
  )
  leaves: list[_GraphLeaf] = []
  for key_path, variable in variables:
    path = tuple(_key_value(key) for key in key_path)
    above = [kinds.get(path[:i]) for i in range(len(path))]
    same = {name for i in range(len(path)) for name in equal.get(path[:i], ())}
    own = tuple(name for name in core.axis_names(axis_name) if name not in same)
    spec = cut.get(path, P())
    if core.PerWorker in above:
      spec = P(own if same else axis_name) if own else P()
    metric = None
    if isinstance(variable, nnx.metrics.MetricState):
      metric = "/".join(map(str, path[:-1])), above[-1]
    kind = type(variable) if isinstance(variable, nnx.Variable) else None
    leaf = _GraphLeaf("/".join(map(str, path)), kind, spec, metric)
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


def _choose_joins(
  leaves: Sequence[_GraphLeaf],
  axis_name: AxisName,
  averaged: tuple[type, ...],
  shapes: PyTree,
  differs: Sequence[bool],
) -> list[extend.Join]:
  """Chooses how the workers' arrays and results become one."""
  new, results = shapes
  count = len(leaves)
  summed = [
    leaf.metric
    for leaf, differ in zip(leaves, differs[:count], strict=True)
    if differ and leaf.metric is not None
  ]
  for path, kind in summed:
    if kind is None or not issubclass(kind, nnx.metrics.Average):
      raise TypeError(
        f"`{path}` must be an nnx.metrics.Average or Accuracy, got {kind}: "
        "sums of its state over workers mean nothing. Update it after the step."
      )
  joins: list[extend.Join] = []
  for leaf, x, differ in zip(leaves, new, differs[:count], strict=True):
    is_sum = leaf.metric in summed and leaf.spec == P()
    mean = leaf.kind is not None and issubclass(leaf.kind, averaged)
    joins.append(
      "sum"
      if is_sum
      else extend.join_name(
        x, leaf.spec, differ, leaf.path, axis_name, mean=mean
      )
    )
  named = zip(core.named_leaves(results), differs[count:], strict=True)
  return joins + [
    extend.join_name(x, P(), differ, f"result {path}", axis_name)
    for (path, x), differ in named
  ]
