"""Runs a function as each worker of a mesh axis, and joins the results."""

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

# What is done with a result: a partition spec leaves each worker its own part,
# "equal" leaves it, "mean" and "sum" join them, "first" takes that of worker 0.
Join = P | str
Decide = Callable[[PyTree, Sequence[bool]], Sequence[Join]]


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
  leaf_specs = jax.tree.leaves(_model_axes.spread_specs(specs, args))
  varying = [axes & _model_axes.sharded_axes(spec) for spec in leaf_specs]
  args = jax.tree.unflatten(
    jax.tree.structure(args),
    [
      core.place_tree(x, mesh, _keep_others(x, spec, axes))
      for x, spec in zip(jax.tree.leaves(args), leaf_specs, strict=True)
    ],
  )
  maps: Any = dict(
    mesh=mesh, in_specs=specs, axis_names=set(axes), check_vma=False
  )
  traced = []

  def trace_once(*local: PyTree) -> jax.Array:
    traced.append(jax.make_jaxpr(fun, return_shape=True)(*local))
    return jnp.zeros(())

  jax.eval_shape(jax.shard_map(trace_once, out_specs=P(), **maps), *args)
  closed, shapes = traced[0]
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
  """Returns how a result of a step is joined, or raises."""
  # spec: that of a result of which each worker has its own part, or P().
  # mean: whether it may be averaged; floating-point scalars always may. key:
  # whether it is a raw PRNG key; typed ones tell.
  if spec != P():
    return spec
  if not differs:
    return "equal"
  if jnp.issubdtype(x.dtype, jnp.floating) and (mean or not x.shape):
    return "mean"
  if key or is_key(x):
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
  """Folds the worker into replicated keys; also returns what undoes it."""
  # Keys are typed ones anywhere, and an argument that is one raw key.
  # The new keys are held, because their ids tell them.
  known: dict[int, tuple[Any, Any]] = {}

  def fold_leaf(x: Any, spec: P) -> Any:
    if spec != P() or not (is_key(x) or x is raw):
      return x
    new = _fold_worker(x, axis_name)
    known[id(new)] = new, x
    return new

  def restore_key(x: Any) -> Any:
    return known.get(id(x), (x, x))[1]

  folded = {}
  for name, arg in args.items():
    raw = arg if is_raw_key(arg) else None
    folded[name] = jax.tree.map(fold_leaf, arg, specs[name])
  return folded, restore_key


def is_key(x: Any) -> bool:
  """Returns whether an array has typed PRNG keys."""
  dtype = getattr(x, "dtype", None)
  return dtype is not None and jnp.issubdtype(dtype, jax.dtypes.prng_key)


def is_raw_key(x: Any) -> bool:
  """Returns whether an argument or result is like `jax.random.PRNGKey(0)`."""
  return getattr(x, "shape", None) == (2,) and x.dtype == jnp.uint32


def _fold_worker(key: Any, axis_name: AxisName) -> Any:
  # key: typed keys of any shape or one raw key, equal on all workers.
  index = core.worker_index(axis_name)
  if not is_key(key) or not key.ndim:
    return jax.random.fold_in(key, index)
  fold = jax.vmap(lambda k: jax.random.fold_in(k, index))
  return fold(key.reshape(-1)).reshape(key.shape)


def _join_result(x: Any, join: Join, axis_name: AxisName) -> Any:
  if join == "mean":
    return lax.pmean(x, axis_name)
  if join == "sum":
    return lax.psum(x, axis_name)
  if join == "first":
    if is_key(x):
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
