"""Decorator that runs a training step of one's own on every worker."""

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, PartitionSpec as P

from jaxmotion import core, program
from jaxmotion.core import AxisName, PyTree
from jaxmotion.transforms import _model_axes
from jaxmotion.transforms._step import _compiled_step, _step_arguments
from jaxmotion.transforms._step._step_arguments import Static, StepParameters

# What is done with a result: a partition spec leaves each worker its own part,
# "equal" leaves it, "mean" and "sum" join them, "first" takes that of worker 0.
Join = P | str
Decide = Callable[[PyTree, Sequence[bool]], Sequence[Join]]


@core.declare(mean=core.sequence("strings", core.text))
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
      step raises it for a result that differs between workers, by its path, for
      a batch that the workers do not divide, and for a sharding that is
      constrained along the workers' axis.

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
  patterns = core.PathRules([(name, None) for name in mean], name="mean")
  return _step_arguments.make_decorator(
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
  parameters: StepParameters,
  mesh: Mesh,
  axis_name: AxisName,
  *,
  patterns: core.PathRules[Any],
) -> Callable[..., Any]:
  """Jits a step of one's own that runs on every worker's batch."""
  split = parameters.split

  def run_step(
    donated: dict[str, PyTree], kept: dict[str, PyTree], static: Static
  ) -> PyTree:
    """Runs the step on every worker's own rows of the batch."""
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
    raw_keys = any(_step_arguments.is_raw_key(args[name]) for name in others)

    def run_local(args: dict[str, PyTree]) -> PyTree:
      """Runs the step on one worker, with random keys of its own."""
      folded, restore_key = fold_keys(
        {name: args[name] for name in args if name in others}, specs, axis_name
      )
      results = parameters.call(args | folded, static)
      return jax.tree.map(restore_key, results)

    def decide(shapes: PyTree, differs: Sequence[bool]) -> list[Join]:
      """Says for each result how the workers join it."""
      leaves = core.named_leaves(shapes)
      patterns.require_use([path for path, _ in leaves], "result")
      specs = jax.tree.leaves(core.state_specs(shapes, axis_name))
      return [
        join_name(
          x,
          spec,
          differ,
          f"{parameters.name}: {path}",
          axis_name,
          mean=patterns.first_match(path) is not None,
          key=raw_keys and _step_arguments.is_raw_key(x),
        )
        for (path, x), spec, differ in zip(leaves, specs, differs, strict=True)
      ]

    return run_on_workers(run_local, mesh, axis_name, [args], [specs], decide)

  jitted = jax.jit(run_step, donate_argnums=0, static_argnums=2)
  calls = _compiled_step.StepCalls(mesh, has_static=True)

  def place(
    arguments: dict[str, PyTree], static: Static
  ) -> tuple[PyTree, PyTree, Static]:
    """Puts arguments on the mesh; returns what `run_step` takes."""
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


def run_on_workers(
  fun: Callable[..., PyTree],
  mesh: Mesh,
  axis_name: AxisName,
  args: Sequence[PyTree],
  specs: Sequence[PyTree],
  decide: Decide,
) -> PyTree:
  """Runs a function as each worker of a mesh axis, inside of `jit`."""
  # The function is traced once, without types of what varies over workers,
  # which would refuse loops that start from constants. The traced program then
  # tells which results may differ, and `decide` says how these are joined.
  # fun: takes one worker's arguments. args: whole arrays. specs: one for each
  # leaf of `args`, or prefixes.
  # decide: (shapes of results, whether each leaf may differ) -> a `Join` for
  # each. Results with a partition spec are split, others replicated.
  axes = frozenset(core.axis_names(axis_name))
  args, specs = tuple(args), tuple(specs)
  full = _model_axes.spread_specs(specs, args)
  varying = [
    axes & _model_axes.sharded_axes(spec) for spec in jax.tree.leaves(full)
  ]
  args = jax.tree.map(
    lambda x, spec: core.place_tree(x, mesh, _keep_others(x, spec, axes)),
    args,
    full,
  )
  maps: Any = dict(
    mesh=mesh, in_specs=specs, axis_names=set(axes), check_vma=False
  )
  trace = jax.make_jaxpr(fun, return_shape=True)
  closed, shapes = core.call_in_map(trace, maps, *args)
  differs = list(map(bool, program.find_varying(closed, varying, axes)))
  joins = decide(shapes, differs)

  def run_traced(*local: PyTree) -> list[Any]:
    results = core.jax_core.jaxpr_as_fun(closed)(*jax.tree.leaves(local))
    return [
      _join_result(result, join, axis_name)
      for result, join in zip(results, joins, strict=True)
    ]

  joined = jax.shard_map(
    run_traced,
    out_specs=[join if isinstance(join, P) else P() for join in joins],
    **maps,
  )(*args)
  return jax.tree.unflatten(jax.tree.structure(shapes), joined)


def join_name(
  x: Any,
  spec: P,
  differs: bool,
  path: str,
  axis_name: AxisName,
  *,
  mean: bool = False,
  key: bool = False,
) -> Join:
  """Chooses how the workers' results become one; raises if none fits."""
  # spec: that of a result of which each worker has its own part, or P().
  # mean: whether it may be averaged; floating-point scalars always may. key:
  # whether it is a raw PRNG key; typed ones tell.
  if spec != P():
    return spec
  if not differs:
    return "equal"
  if jnp.issubdtype(x.dtype, jnp.floating) and (mean or not x.shape):
    return "mean"
  if key or _step_arguments.is_key(x):
    return "first"
  raise ValueError(
    f"`fun` must return results that are equal on all workers of {axis_name!r}"
    f", got one that differs at {path!r}: begin the optimizer with "
    "jaxmotion.exchange, average statistics by `mean`, agree on a choice by "
    "jax.lax.pmin, and sum or gather other results by jax.lax."
  )


def fold_keys(
  args: dict[str, PyTree], specs: dict[str, PyTree], axis_name: AxisName
) -> tuple[dict[str, PyTree], Callable[[Any], Any]]:
  """Gives each worker keys of its own; also returns what gives the old ones."""
  # Keys are typed ones anywhere, and an argument that is one raw key.
  # The new keys are held, because their ids tell them.
  known: dict[int, tuple[Any, Any]] = {}

  def fold_leaf(x: Any, spec: P) -> Any:
    if spec != P() or not (_step_arguments.is_key(x) or x is raw):
      return x
    new = _fold_worker(x, axis_name)
    known[id(new)] = new, x
    return new

  folded = {}
  for name, arg in args.items():
    raw = arg if _step_arguments.is_raw_key(arg) else None
    folded[name] = jax.tree.map(fold_leaf, arg, specs[name])
  return folded, lambda x: known.get(id(x), (x, x))[1]


def _fold_worker(key: Any, axis_name: AxisName) -> Any:
  # key: typed keys of any shape or one raw key, equal on all workers.
  index = core.worker_index(axis_name)
  if not _step_arguments.is_key(key) or not key.ndim:
    return jax.random.fold_in(key, index)
  fold = jax.vmap(lambda k: jax.random.fold_in(k, index))
  return fold(key.reshape(-1)).reshape(key.shape)


def _join_result(x: Any, join: Join, axis_name: AxisName) -> Any:
  """Joins the results of all workers, as `join_name` chose."""
  if join == "mean":
    return lax.pmean(x, axis_name)
  if join == "sum":
    return lax.psum(x, axis_name)
  if join == "first":
    if _step_arguments.is_key(x):
      words = _join_result(jax.random.key_data(x), join, axis_name)
      return jax.random.wrap_key_data(words, impl=jax.random.key_impl(x))
    is_first = core.worker_index(axis_name) == 0
    return lax.psum(jnp.where(is_first, x, jnp.zeros_like(x)), axis_name)
  return x


def _keep_others(x: Any, spec: P, axes: frozenset[Any]) -> P:
  """Returns a spec over workers, and over other axes as an array has it."""
  sharding = getattr(jax.typeof(x), "sharding", None)
  held = () if sharding is None else tuple(sharding.spec)
  entries = [
    (*core.spec_axes(own), *(n for n in core.spec_axes(other) if n not in axes))
    for own, other in itertools.zip_longest(spec, held)
  ]
  return P(*(entry or None for entry in entries))
