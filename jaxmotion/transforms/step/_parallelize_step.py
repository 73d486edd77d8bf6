"""Decorator that runs a training step of one's own on every worker."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec as P

from jaxmotion import core, hosts
from jaxmotion.core import AxisName, PyTree
from jaxmotion.transforms import _init_state
from jaxmotion.transforms.step import (
  _run_on_workers,
  _step_arguments,
  _step_parameters,
)


def parallelize_step(
  mesh: Mesh,
  *,
  axis_name: AxisName = "data",
  batch: str | Sequence[str] = "batch",
  mean: Sequence[str] = (),
  static_argnames: str | Sequence[str] = (),
  static_argnums: int | Sequence[int] = (),
  donate_argnames: str | Sequence[str] = (),
  donate_argnums: int | Sequence[int] = (),
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
  """Makes a decorator that runs a training step on every worker's own batch.

  It takes the place of `jax.jit`. The step computes its gradient from its own
  part of the batch, and an `exchange` in its optimizer averages the gradients:

  - arguments named by `batch` are split along their leading axis, scalars in
    them excepted. `PerWorker` state is each worker's own. All else is
    replicated.
  - a PRNG key (typed, anywhere in the replicated arguments, or an argument that
    is one raw key) is folded by the worker's index. An unchanged key is
    returned as it was given; of a new one that of worker 0 is returned.
  - results have to be equal on all workers, which is read from the traced step.
    Floating-point scalars that differ, such as the loss, are averaged.

  `lax.pmean(x, axis_name)` and the other collectives work in the step.

  Args:
    mesh: device mesh that has the axis; further axes are left to the step.
    axis_name: the axis (or axes) that the batch is split over.
    batch: name of the parameter of the step that is split, or several.
    mean: regular expressions; results whose path one of them matches are
      averaged where they differ, such as "batch_stats".
    static_argnames: names of parameters whose values the trace sees, such as
      `train` or `self`. The step is compiled for each value.
    static_argnums: positions of such parameters.
    donate_argnames: names of parameters whose buffers are given to the results.
    donate_argnums: positions of such parameters.

  Returns:
    A decorator; what it returns is jitted. Parameters that a call leaves out
    have their defaults, which are not traced.

  Raises:
    TypeError: an argument of another type.
    ValueError: the mesh has no such axis, or the step no such parameter. The
      step raises it for a result that differs between workers, by its path, and
      for a batch that the workers do not divide.

  Example:
    >>> import optax
    >>> from jaxmotion import codecs, transforms
    >>> mesh = jax.sharding.Mesh(jax.devices()[:1], ("data",))
    >>> codec = codecs.feedback(codecs.uniform(bits=8))
    >>> tx = optax.chain(
    ...   transforms.exchange("data", codec), optax.sgd(0.1)
    ... )
    >>> tx = transforms.bind_mesh(tx, mesh)
    >>> @parallelize_step(mesh)
    ... def train_step(params, opt_state, batch):
    ...   def loss_fn(params):
    ...     return jnp.mean((batch["x"] @ params["w"] - batch["y"]) ** 2)
    ...   loss, grads = jax.value_and_grad(loss_fn)(params)
    ...   updates, opt_state = tx.update(grads, opt_state, params)
    ...   return optax.apply_updates(params, updates), opt_state, loss
    >>> params = {"w": jnp.zeros((2, 1))}
    >>> batch = {"x": jnp.eye(2), "y": jnp.ones((2, 1))}
    >>> params, opt_state, loss = train_step(params, tx.init(params), batch)
    >>> float(loss)
    1.0
  """
  axis_name = _init_state.check_mesh(mesh, axis_name)
  split = _step_arguments.check_batch_names(batch)
  options = _step_parameters.StepOptions(
    static_argnames, static_argnums, donate_argnames, donate_argnums
  )
  patterns = core.PathRules(
    [(p, None) for p in _step_arguments.check_names("mean", mean)], name="mean"
  )

  def decorate(fun: Callable[..., Any]) -> Callable[..., Any]:
    parameters = _step_parameters.StepParameters(fun, split, options)

    def run_step(
      args: dict[str, PyTree],
      given: dict[str, PyTree],
      static: _step_parameters.Static,
    ) -> PyTree:
      args = {**args, **given}
      specs = {
        name: _step_arguments.split_specs(
          name, arg, mesh, axis_name, optional=True
        )
        if name in split
        else core.state_specs(arg, axis_name)
        for name, arg in args.items()
      }

      raw_keys = any(
        _is_raw_key(args[name]) for name in args.keys() - set(split)
      )

      def run_local(args: dict[str, PyTree]) -> PyTree:
        args, keys = _fold_keys(args, split, axis_name)
        given = {id(folded): key for folded, key in keys}
        results = parameters.call(args, static)
        return jax.tree.map(lambda x: given.get(id(x), x), results)

      decide = functools.partial(
        _decide,
        name=parameters.name,
        patterns=patterns,
        raw_keys=raw_keys,
        axis_name=axis_name,
      )
      return _run_on_workers.run_on_workers(
        run_local, mesh, axis_name, [args], [specs], decide
      )

    jitted = jax.jit(run_step, donate_argnums=0, static_argnums=2)
    in_flight = hosts.StepsInFlight(mesh)

    def place(arguments: dict[str, PyTree]) -> tuple[PyTree, PyTree]:
      placed = dict(arguments)
      for name in arguments.keys() - set(split):
        specs = core.state_specs(arguments[name], axis_name)
        placed[name] = _step_arguments.place_arguments(
          arguments[name], mesh, specs, axis_name
        )
      donated = {
        name: placed.pop(name) for name in parameters.donated if name in placed
      }
      return donated, placed

    @functools.wraps(fun)
    def step(*args: Any, **kwargs: Any) -> Any:
      arguments, static = parameters.bind(args, kwargs)
      core.check_buffers(arguments, parameters.donated)
      in_flight.wait(arguments)
      try:
        results = jitted(*place(arguments), static)
      except (TypeError, ValueError, OverflowError):
        # Only after an error: a step shall not look at every leaf.
        _step_parameters.check_traced(arguments)
        core.check_on_mesh({name: arguments[name] for name in split}, mesh)
        raise
      in_flight.add(results)
      return results

    def call_method(
      method: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> Any:
      arguments, static = parameters.bind(args, kwargs)
      return method(*place(arguments), static)

    for name in ("lower", "trace", "eval_shape"):
      bound = functools.partial(call_method, getattr(jitted, name))
      setattr(step, name, bound)
    return step

  return decorate


def _fold_keys(
  args: dict[str, PyTree], split: Sequence[str], axis_name: AxisName
) -> tuple[dict[str, PyTree], list[tuple[Any, Any]]]:
  """Folds the worker into keys: (arguments, pairs of a new and its old key)."""
  pairs: list[tuple[Any, Any]] = []

  def fold_leaf(x: Any, spec: P) -> Any:
    if spec != P() or not (x is raw or _run_on_workers.is_key(x)):
      return x
    pairs.append((_run_on_workers.fold_worker(x, axis_name), x))
    return pairs[-1][0]

  folded = {}
  for name, arg in args.items():
    raw = arg if _is_raw_key(arg) else None
    specs = core.state_specs(arg, axis_name)
    folded[name] = arg if name in split else jax.tree.map(fold_leaf, arg, specs)
  return folded, pairs


def _is_raw_key(x: Any) -> bool:
  """Returns whether an argument or result is like `jax.random.PRNGKey(0)`."""
  return getattr(x, "shape", None) == (2,) and x.dtype == jnp.uint32


def _decide(
  shapes: PyTree,
  differs: Sequence[bool],
  *,
  name: str,
  patterns: core.PathRules[Any],
  raw_keys: bool,
  axis_name: AxisName,
) -> list[_run_on_workers.Join]:
  """Says how each result is joined, or raises for one that may not differ."""
  leaves = core.named_leaves(shapes)
  patterns.require_use([path for path, _ in leaves], "result")
  specs = jax.tree.leaves(core.state_specs(shapes, axis_name))
  joins: list[_run_on_workers.Join] = []
  for (path, x), spec, differ in zip(leaves, specs, differs, strict=True):
    if spec != P():
      joins.append(spec)
    else:
      joins.append(
        _run_on_workers.join_name(
          x,
          differ,
          f"{name}: {path}",
          axis_name,
          mean=patterns.first_match(path) is not None,
          key=raw_keys and _is_raw_key(x),
        )
      )
  return joins
