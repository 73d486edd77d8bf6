"""Decorator that runs a training step of one's own on every worker."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.sharding import Mesh

from jaxmotion import core
from jaxmotion.core import AxisName, PyTree
from jaxmotion.transforms.step import (
  _compiled_step,
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
  names = _step_arguments.check_names("mean", mean)
  patterns = core.PathRules([(name, None) for name in names], name="mean")
  return _step_parameters.make_decorator(
    functools.partial(_map_step, patterns=patterns),
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
  parameters: _step_parameters.StepParameters,
  mesh: Mesh,
  axis_name: AxisName,
  *,
  patterns: core.PathRules[Any],
) -> Callable[..., Any]:
  """Returns a step that runs on every worker, jitted."""
  split = parameters.split

  def run_step(
    donated: dict[str, PyTree],
    kept: dict[str, PyTree],
    static: _step_parameters.Static,
  ) -> PyTree:
    args = {**donated, **kept}
    specs = {
      name: _step_arguments.split_specs(
        name, arg, mesh, axis_name, optional=True
      )
      if name in split
      else core.state_specs(arg, axis_name)
      for name, arg in args.items()
    }
    others = args.keys() - set(split)
    raw_keys = any(_run_on_workers.is_raw_key(args[name]) for name in others)

    def run_local(args: dict[str, PyTree]) -> PyTree:
      folded, restore_key = _run_on_workers.fold_keys(
        {name: args[name] for name in args if name in others}, specs, axis_name
      )
      results = parameters.call(args | folded, static)
      return jax.tree.map(restore_key, results)

    def decide(
      shapes: PyTree, differs: Sequence[bool]
    ) -> list[_run_on_workers.Join]:
      leaves = core.named_leaves(shapes)
      patterns.require_use([path for path, _ in leaves], "result")
      specs = jax.tree.leaves(core.state_specs(shapes, axis_name))
      return [
        _run_on_workers.join_name(
          x,
          spec,
          differ,
          f"{parameters.name}: {path}",
          axis_name,
          mean=patterns.first_match(path) is not None,
          key=raw_keys and _run_on_workers.is_raw_key(x),
        )
        for (path, x), spec, differ in zip(leaves, specs, differs, strict=True)
      ]

    return _run_on_workers.run_on_workers(
      run_local, mesh, axis_name, [args], [specs], decide
    )

  jitted = jax.jit(run_step, donate_argnums=0, static_argnums=2)
  calls = _compiled_step.StepCalls(mesh, has_static=True)

  def place(
    arguments: dict[str, PyTree], static: _step_parameters.Static
  ) -> tuple[PyTree, PyTree, _step_parameters.Static]:
    kept = dict(arguments)
    for name in arguments.keys() - set(split):
      specs = core.state_specs(arguments[name], axis_name)
      kept[name] = _step_arguments.place_arguments(
        arguments[name], mesh, specs, axis_name
      )
    donated = {n: kept.pop(n) for n in parameters.donated if n in kept}
    return donated, kept, static

  @functools.wraps(fun)
  def step(*args: Any, **kwargs: Any) -> Any:
    arguments, static = parameters.bind(args, kwargs)
    with calls.guard(arguments, parameters.donated, split):
      results = jitted(*place(arguments, static))
    calls.add(results)
    return results

  _compiled_step.copy_methods(
    step, jitted, lambda args, kwargs: place(*parameters.bind(args, kwargs))
  )
  return step
