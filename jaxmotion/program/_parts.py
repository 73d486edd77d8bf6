"""Evaluates a program of whole arrays on one worker's parts of them.

The program is traced once, as if there were one worker. Inside a map over the
workers it is then evaluated on each worker's part of the batch, and means what
it meant: a mean over the batch sums over workers before it divides. What every
worker computes is differentiated in the map. So the gradient of a parameter is
a worker's own, and the mean of all workers' is the gradient of the program.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxmotion import core
from jaxmotion.core import PyTree
from jaxmotion.program import _flatten, _part_rules
from jaxmotion.program._flatten import Step
from jaxmotion.program._part_rules import SUMMAND, Part, Parts, Workers

Dims = Sequence[int | None]


def evaluate_parts(jaxpr: Any, parts: Parts, workers: Workers) -> list[Part]:
  """Returns what a worker holds of a program's results."""
  # jaxpr: a closed one of whole arrays, or an open one without constants.
  program = _flatten.flatten(jaxpr)
  env = dict(zip(program.inputs, parts, strict=True))
  env.update((v, Part(array)) for v, array in program.constants.items())

  def read(operand: Any) -> Part:
    if isinstance(operand, _flatten.Value):
      return env[operand]
    return Part(jnp.asarray(operand.val, operand.aval.dtype))

  for step in program.steps:
    ins = [read(operand) for operand in step.ins]
    rule = _CONTROL.get(step.name) or _part_rules.RULES.get(step.name)
    model = _move_weight(step, ins)
    if model is None and step.name not in _PASSES_WEIGHTS:
      ins = [p if p.model is None else Part(workers.whole(p)) for p in ins]
    outs = (rule or _part_rules.run_whole)(workers, step, ins)
    if model is not None:
      outs = [dataclasses.replace(part, model=model) for part in outs]
    env.update(zip(step.outs, outs, strict=True))
  return [read(operand) for operand in program.outputs]


def _move_weight(step: Step, ins: Parts) -> tuple[Any, ...] | None:
  """Returns how a model shards weights that an operation moves; None: no."""
  if not ins or ins[0].model is None:
    return None
  if step.name in ("convert_element_type", "copy"):
    return ins[0].model
  if step.name == "transpose":
    return tuple(ins[0].model[d] for d in step.params["permutation"])
  return None


def _dims(parts: Parts) -> list[int | None]:
  """Returns how parts are divided."""
  return [part.dim for part in parts]


def _join_dims(a: int | None, b: int | None) -> int | None:
  """Returns how a value is divided that two ways lead to."""
  return b if a is None else a


def _grow_dims(
  carry: Parts, trace_body: Callable[[Dims], Parts]
) -> tuple[Dims, Dims]:
  """Returns how a loop's carry and its other results are divided."""
  # trace_body: division of the carry -> shapes of what the body returns.
  dims: Dims = _dims(carry)
  while True:
    found = _dims(trace_body(dims))
    # A carry that starts whole becomes what the body makes of it.
    grown = list(map(_join_dims, dims, found[: len(dims)]))
    if grown == dims:
      return dims, found[len(dims) :]
    dims = grown


def _divide(workers: Workers, parts: Parts, dims: Dims) -> list[Part]:
  """Returns the worker's parts of values, divided in a given way."""
  return [
    Part(workers.take(part, dim), dim)
    for part, dim in zip(parts, dims, strict=True)
  ]


def _scan(workers: Workers, step: Step, ins: Parts) -> list[Part]:
  """Scans with a carry, and results, divided as the body divides them."""
  params = step.params
  body, num_consts, num_carry = core.scan_parts(params)
  ins = workers.settle(ins)
  consts, carry = ins[:num_consts], ins[num_consts:][:num_carry]
  # Every worker runs all iterations.
  xs = [
    Part(workers.whole(p)) if p.dim == 0 else p
    for p in ins[num_consts + num_carry :]
  ]
  arrays = [p.array for p in xs]

  def take_row(part: Part, row: Any) -> Part:
    dim = None if part.dim is None else part.dim - 1
    return Part(row, dim, None if part.model is None else part.model[1:])

  def run_body(carry: Parts, x: Sequence[Any]) -> list[Part]:
    own = [*consts, *carry, *map(take_row, xs, x)]
    return workers.settle(evaluate_parts(body, own, workers))

  def trace_body(dims: Dims) -> Parts:
    first = [jax.ShapeDtypeStruct(x.shape[1:], x.dtype) for x in arrays]
    start = _divide(workers, carry, dims)
    return jax.eval_shape(run_body, start, first)

  dims, y_dims = _grow_dims(carry, trace_body)

  def run_iteration(
    carry: list[Part], x: list[Any]
  ) -> tuple[list[Part], list[Any]]:
    out = run_body(carry, x)
    ys = _divide(workers, out[num_carry:], y_dims)
    return _divide(workers, out[:num_carry], dims), [y.array for y in ys]

  last, ys = lax.scan(
    run_iteration,
    _divide(workers, carry, dims),
    arrays,
    length=params["length"],
    reverse=params["reverse"],
    unroll=params.get("unroll", 1),
  )
  stacked = [None if d is None else d + 1 for d in y_dims]
  return [*last, *map(Part, ys, stacked)]


def _while(workers: Workers, step: Step, ins: Parts) -> list[Part]:
  """Loops with a carry that is divided as the body divides it."""
  params, ins = step.params, workers.settle(ins)
  num_cond = params["cond_nconsts"]
  num_consts = num_cond + params["body_nconsts"]
  cond_consts, body_consts = ins[:num_cond], ins[num_cond:num_consts]
  carry = ins[num_consts:]

  def run_body(carry: Parts) -> list[Part]:
    own = [*body_consts, *carry]
    return workers.settle(evaluate_parts(params["body_jaxpr"], own, workers))

  dims, _ = _grow_dims(
    carry,
    lambda dims: jax.eval_shape(run_body, _divide(workers, carry, dims)),
  )

  def goes_on(carry: list[Part]) -> Any:
    own = [*cond_consts, *carry]
    # All workers decide alike.
    return workers.whole(evaluate_parts(params["cond_jaxpr"], own, workers)[0])

  return lax.while_loop(
    goes_on,
    lambda carry: _divide(workers, run_body(carry), dims),
    _divide(workers, carry, dims),
  )


def _cond(workers: Workers, step: Step, ins: Parts) -> list[Part]:
  """Chooses a branch; results are divided as one of the branches does."""
  index, *operands = workers.settle(ins)

  def run_branch(branch: Any, operands: Parts) -> list[Part]:
    return workers.settle(evaluate_parts(branch, operands, workers))

  runs = [functools.partial(run_branch, b) for b in step.params["branches"]]
  found = [_dims(jax.eval_shape(run, operands)) for run in runs]
  dims = [
    functools.reduce(_join_dims, each) for each in zip(*found, strict=True)
  ]

  def divide_results(
    run: Callable[..., list[Part]], operands: list[Part]
  ) -> list[Part]:
    return _divide(workers, run(operands), dims)

  branches = [functools.partial(divide_results, run) for run in runs]
  return lax.switch(workers.whole(index), branches, operands)


def _remat(workers: Workers, step: Step, ins: Parts) -> list[Part]:
  """Keeps `jax.checkpoint` around a part of the program."""
  params = step.params
  run = lambda ins: evaluate_parts(params["jaxpr"], ins, workers)
  return jax.checkpoint(
    run, policy=params["policy"], prevent_cse=params["prevent_cse"]
  )(list(ins))


def _shard_map(workers: Workers, step: Step, ins: Parts) -> list[Part]:
  """Runs a map over axes of a model; refuses one over the workers' axis."""
  # Inside of it the workers' axis would be bound twice.
  (body,) = _flatten.inner_jaxprs(step.eqn)
  values = (*body.invars, *body.outvars)
  bound = {n for v in values for n in v.aval.sharding.mesh.manual_axes}
  if not bound.isdisjoint(core.axis_names(workers.axis_name)):
    raise ValueError(
      "`fun` must hold no `jax.shard_map` over the workers' axis "
      f"{workers.axis_name!r}, got one: call the mapped function itself, whose "
      "gradient is then compressed, or take gradients inside of the map by "
      "`jaxmotion.local_value_and_grad`."
    )
  return _part_rules.run_whole(workers, step, ins)


def _call(workers: Workers, step: Step, ins: Parts) -> list[Part]:
  """Enters a call that means nothing by itself."""
  (inner,) = _flatten.inner_jaxprs(step.eqn)
  return evaluate_parts(inner, ins, workers)


def _trace_whole(
  workers: Workers, fun: Callable[..., PyTree], *like: PyTree
) -> tuple[Any, PyTree]:
  """Traces a function of whole arrays, outside of the map over workers."""
  # Returns the program, and the shapes of its results.
  with jax.sharding.use_abstract_mesh(workers.mesh):
    return jax.make_jaxpr(fun, return_shape=True)(*like)


def _likes(variables: Sequence[Any]) -> list[Any]:
  """Returns shapes, dtypes and explicit shardings of a program's values."""
  # The program was traced for these shardings, which its constants have.
  return [
    jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype, sharding=v.aval.sharding)
    for v in variables
  ]


def _custom_jvp(workers: Workers, step: Step, ins: Parts) -> list[Part]:
  """Keeps a function's own derivative, by its trace on whole arrays."""
  likes, count = _likes(step.eqn.invars), len(step.outs)
  floats = [i for i, a in enumerate(likes) if core.is_inexact(a)]

  @jax.custom_jvp
  def run(ins: list[Part]) -> list[Part]:
    return workers.settle(_call(workers, step, ins))

  def differentiate(
    primals: Sequence[Any], tangents: Sequence[Any]
  ) -> tuple[list[Any], list[Any]]:
    given = dict(zip(floats, tangents, strict=True))
    full = [given.get(i, _no_tangent(a)) for i, a in enumerate(likes)]
    values, moved = jax.jvp(lambda *a: list(step.run(a)), primals, full)
    # Integers have no tangent.
    return values, [
      t for t, v in zip(moved, values, strict=True) if core.is_inexact(v)
    ]

  @run.defjvp
  def run_jvp(
    primals: tuple[list[Part]], tangents: tuple[list[Part]]
  ) -> tuple[list[Part], list[Part]]:
    (ins,), (moves,) = primals, tangents
    closed, _ = _trace_whole(
      workers, differentiate, likes, [likes[i] for i in floats]
    )
    own = [Part(moves[i].array, ins[i].dim) for i in floats]
    out = workers.settle(evaluate_parts(closed, [*ins, *own], workers))
    values, moved = out[:count], iter(out[count:])
    # A tangent is divided like its value.
    return values, [
      Part(
        workers.take(next(moved), v.dim)
        if core.is_inexact(v.array)
        else _no_tangent(v.array),
        v.dim,
      )
      for v in values
    ]

  return run(workers.settle(ins))


def _no_tangent(like: Any) -> Any:
  """Returns the tangent of an array of integers."""
  return np.zeros(like.shape, jax.dtypes.float0)


def _custom_vjp(workers: Workers, step: Step, ins: Parts) -> list[Part]:
  """Runs a `jax.custom_vjp` on parts, and differentiates it by its rule."""
  # The rule is traced on whole arrays, forward and backward, and each of both
  # programs is evaluated on parts.
  likes, results = _likes(step.eqn.invars), _likes(step.eqn.outvars)
  ins = workers.settle(ins)
  dims = _dims(ins)

  @functools.cache
  def trace_forward() -> tuple[Any, PyTree]:
    pull_forward = lambda *args: jax.vjp(lambda *a: list(step.run(a)), *args)
    return _trace_whole(workers, pull_forward, *likes)

  @jax.custom_vjp
  def run(ins: list[Part]) -> list[Part]:
    return workers.settle(_call(workers, step, ins))

  def run_forward(ins: list[Part]) -> tuple[list[Part], list[Part]]:
    closed, _ = trace_forward()
    out = workers.settle(evaluate_parts(closed, ins, workers))
    results_out, saved = out[: len(results)], out[len(results) :]
    return results_out, saved

  def run_backward(
    saved: list[Part], cotangents: list[Part]
  ) -> tuple[list[Part]]:
    _, (_, pull) = trace_forward()  # `pull` holds what the forward pass saves.
    treedef: Any = jax.tree.structure(pull)
    pull_back = lambda saved, cotangents: treedef.unflatten(saved)(cotangents)
    closed, _ = _trace_whole(workers, pull_back, jax.tree.leaves(pull), results)
    # Cotangents of a value that all workers hold whole are summands.
    given = [
      Part(p.array, SUMMAND if p.dim is None else p.dim) for p in cotangents
    ]
    out = evaluate_parts(closed, [*saved, *given], workers)
    to_cotangent = functools.partial(_to_cotangent, workers)
    return (list(map(to_cotangent, out, dims)),)

  run.defvjp(run_forward, run_backward)
  return run(ins)


def _to_cotangent(workers: Workers, part: Part, dim: int | None) -> Part:
  """Returns a worker's cotangent of an operand that is divided in a way."""
  if dim is not None:
    return Part(workers.take(part, dim), dim)
  if part.dim == SUMMAND or not core.is_inexact(part.array):
    return Part(part.array)
  # Those of all workers are added up.
  return Part(workers.whole(part) / workers.count)


_CONTROL: dict[str, _part_rules.Rule] = {
  "checkpoint": _remat,
  "closed_call": _call,
  "cond": _cond,
  "custom_jvp_call": _custom_jvp,
  "custom_vjp_call": _custom_vjp,
  "jit": _call,
  "remat2": _remat,
  "scan": _scan,
  "shard_map": _shard_map,
  "while": _while,
}
_PASSES_WEIGHTS = _CONTROL.keys() - {"custom_jvp_call", "custom_vjp_call"}
