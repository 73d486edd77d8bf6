"""Decorator that runs a training step on modules on every worker."""

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import jax
from flax import nnx
from jax.sharding import Mesh, PartitionSpec as P

from jaxmotion.core import (
  AxisName,
  PyTree,
  StepsInFlight,
  check_arrays,
  check_bool,
  check_buffers,
  check_callable,
  check_sequence,
  named_leaves,
)
from jaxmotion.nnx._graph_state import GraphLeaf, describe_state, join_state
from jaxmotion.transforms.extend import (
  check_batch_names,
  check_parameter,
  check_step_mesh,
  fold_worker,
  is_key,
  join_name,
  place_arguments,
  run_on_workers,
  split_specs,
)


def parallelize_step(
  mesh: Mesh,
  *,
  axis_name: AxisName = "data",
  batch: str | Sequence[str] = "batch",
  mean: Sequence[type] = (),
  donate: bool = False,
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
  """Makes a decorator that runs a training step on every worker's own batch.

  It stands where `nnx.jit` stood. Modules, optimizers and metrics are updated
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
    donate: whether the buffers of modules, optimizers and metrics are given to
      the results.

  Returns:
    A decorator; what it returns is jitted.

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
  check_step_mesh(mesh, axis_name)
  check_bool("donate", donate)
  split = check_batch_names(batch)
  averaged = (nnx.BatchStat, *check_sequence("mean", mean, "variable types"))
  for kind in averaged:
    is_variable = isinstance(kind, type) and issubclass(kind, nnx.Variable)
    if not is_variable:
      raise TypeError(
        f"`mean` must be a list or tuple of variable types, got {kind!r}."
      )

  def decorate(fun: Callable[..., Any]) -> Callable[..., Any]:
    check_callable("fun", fun)
    signature = inspect.signature(fun)
    for parameter in split:
      check_parameter("batch", parameter, signature)

    @functools.partial(
      jax.jit, static_argnums=(0, 1), donate_argnums=(2,) if donate else ()
    )
    def run_step(
      graph: Any, layout: tuple[Any, ...], state: list[Any], given: PyTree
    ) -> tuple[list[Any], PyTree]:
      treedef, leaves = layout

      def run_local(state: list[Any], given: PyTree) -> PyTree:
        folded = [
          fold_worker(x, axis_name) if is_key(x) and not leaf.own else x
          for x, leaf in zip(state, leaves, strict=True)
        ]
        nodes = nnx.merge(graph, jax.tree.unflatten(treedef, folded))
        bound = signature.bind_partial()
        bound.arguments.update({**nodes, **given})
        results = fun(*bound.args, **bound.kwargs)
        left, new_state = nnx.split(nodes)
        _check_graph(left, graph)
        new = [
          _updated(leaf, old, used, now)
          for leaf, old, used, now in zip(
            leaves, state, folded, jax.tree.leaves(new_state), strict=True
          )
        ]
        return new, results

      def decide(shapes: PyTree, differs: Sequence[bool]) -> list[Any]:
        count = len(leaves)
        joins = join_state(
          leaves, shapes[0], differs[:count], axis_name, averaged
        )
        named = zip(named_leaves(shapes[1]), differs[count:], strict=True)
        return joins + [
          join_name(x, differ, f"result {path}", axis_name)
          for (path, x), differ in named
        ]

      specs = [P(axis_name) if leaf.own else P() for leaf in leaves]
      given_specs = {
        name: split_specs(arg, mesh, axis_name) for name, arg in given.items()
      }
      new, results = run_on_workers(
        run_local, mesh, axis_name, [state, given], [specs, given_specs], decide
      )
      new = [
        old + change if leaf.metric else change
        for leaf, old, change in zip(leaves, state, new, strict=True)
      ]
      return new, results

    in_flight = StepsInFlight(mesh)

    def split_graph(args: Any, kwargs: Any) -> tuple[dict[str, Any], Any]:
      """Returns the graph nodes, and what `run_step` takes."""
      bound = signature.bind(*args, **kwargs)
      bound.apply_defaults()
      nodes = dict(bound.arguments)
      given = {name: nodes.pop(name) for name in split}
      for name, arg in given.items():
        check_arrays(name, arg)
      graph, state = nnx.split(nodes)
      leaves = describe_state(nodes, state)
      arrays, treedef = jax.tree.flatten(state)
      specs = [P(axis_name) if leaf.own else P() for leaf in leaves]
      arrays = place_arguments(arrays, mesh, specs, axis_name)
      return nodes, (graph, (treedef, leaves), arrays, given)

    @functools.wraps(fun)
    def step(*args: Any, **kwargs: Any) -> Any:
      nodes, (graph, layout, arrays, given) = split_graph(args, kwargs)
      paths = [leaf.path for leaf in layout[1]]
      state = dict(zip(paths, arrays, strict=True))
      check_buffers(state | given, paths if donate else ())
      in_flight.wait(arrays)
      new, results = run_step(graph, layout, arrays, given)
      in_flight.add(new)
      nnx.update(nodes, jax.tree.unflatten(layout[0], new))
      return results

    for name in ("lower", "trace"):
      method = getattr(run_step, name)
      setattr(step, name, lambda *a, f=method, **k: f(*split_graph(a, k)[1]))
    return step

  return decorate


def _check_graph(left: Any, graph: Any) -> None:
  if left != graph:
    raise ValueError(
      "`fun` must keep the variables and static fields of its modules, got "
      "others after the step: call `model.train()` before it, and pop "
      "intermediates within."
    )


def _updated(leaf: GraphLeaf, old: Any, used: Any, now: Any) -> Any:
  """Returns a variable's new array; of a metric, what the worker adds."""
  if leaf.metric:
    return now - old
  return old if now is used else now
