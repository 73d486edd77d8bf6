"""Evaluates a program of whole arrays on one worker's parts of them.

The program is traced once, as if there were one worker. Inside a map over the
workers it is then evaluated on each worker's part of the batch, and means what
it meant: a mean over the batch sums over workers before it divides. What every
worker computes is differentiated in the map. So the gradient of a parameter is
a worker's own, and the mean of all workers' is the gradient of the program.
"""

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
from jaxmotion.program._part_rules import SUMMAND, Part, Workers

Dims = Sequence[int | None]


def evaluate_parts(
  jaxpr: Any, parts: Sequence[Part], workers: Workers
) -> list[Part]:
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
    outs = (rule or _part_rules.run_whole)(workers, step, ins)
    env.update(zip(step.outs, outs, strict=True))
  return [read(operand) for operand in program.outputs]


def _arrays(parts: Sequence[Part]) -> list[Any]:
  """Returns the arrays of parts."""
  return [part.array for part in parts]


def _dims(parts: Sequence[Part]) -> list[int | None]:
  """Returns how parts are divided."""
  return [part.dim for part in parts]


def _find_dims(fun: Callable[[], Sequence[Part]]) -> list[int | None]:
  """Returns how the results of a function are divided, by its trace."""
  found: list[int | None] = []

  def trace() -> list[Any]:
    parts = fun()
    found.extend(_dims(parts))
    return _arrays(parts)

  jax.eval_shape(trace)
  return found


def _join_dims(a: int | None, b: int | None) -> int | None:
  """Returns how a value is divided that two ways lead to."""
  return b if a is None else a


def _grow_dims(
  carry: Sequence[Part], trace_body: Callable[[Dims], Dims]
) -> tuple[Dims, Dims]:
  """Returns how a loop's carry and its other results are divided."""
  # trace_body: division of the carry -> that of what the body returns.
  dims: Dims = _dims(carry)
  while True:
    found = trace_body(dims)
    # A carry that starts whole becomes what the body makes of it.
    carried = found[: len(dims)]
    grown = list(map(_join_dims, dims, carried))
    if grown == dims:
      return dims, found[len(dims) :]
    dims = grown


def _take_all(workers: Workers, parts: Sequence[Part], dims: Dims) -> list[Any]:
  """Returns the worker's part of each value, divided in a given way."""
  return list(map(workers.take, parts, dims))


def _scan(
  workers: Workers, step: _flatten.Step, ins: Sequence[Part]
) -> list[Part]:
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
  x_dims = [None if p.dim is None else p.dim - 1 for p in xs]

  def run_body(
    dims: Dims, carry: Sequence[Any], x: Sequence[Any]
  ) -> list[Part]:
    own = [*consts, *map(Part, carry, dims), *map(Part, x, x_dims)]
    return workers.settle(evaluate_parts(body, own, workers))

  def trace_body(dims: Dims) -> Dims:
    def run_once() -> list[Part]:
      first = [jnp.zeros(a.shape[1:], a.dtype) for a in _arrays(xs)]
      return run_body(dims, _take_all(workers, carry, dims), first)

    return _find_dims(run_once)

  dims, y_dims = _grow_dims(carry, trace_body)

  def run_iteration(
    carry: list[Any], x: list[Any]
  ) -> tuple[list[Any], list[Any]]:
    out = run_body(dims, carry, x)
    carried = _take_all(workers, out[:num_carry], dims)
    return carried, _take_all(workers, out[num_carry:], y_dims)

  last, ys = lax.scan(
    run_iteration,
    _take_all(workers, carry, dims),
    _arrays(xs),
    length=params["length"],
    reverse=params["reverse"],
    unroll=params.get("unroll", 1),
  )
  stacked = [None if d is None else d + 1 for d in y_dims]
  return [*map(Part, last, dims), *map(Part, ys, stacked)]


def _while(
  workers: Workers, step: _flatten.Step, ins: Sequence[Part]
) -> list[Part]:
  """Loops with a carry that is divided as the body divides it."""
  params, ins = step.params, workers.settle(ins)
  num_cond = params["cond_nconsts"]
  num_consts = num_cond + params["body_nconsts"]
  cond_consts, body_consts = ins[:num_cond], ins[num_cond:num_consts]
  carry = ins[num_consts:]

  def run_body(dims: Dims, carry: Sequence[Any]) -> list[Part]:
    own = [*body_consts, *map(Part, carry, dims)]
    return workers.settle(evaluate_parts(params["body_jaxpr"], own, workers))

  dims, _ = _grow_dims(
    carry,
    lambda dims: _find_dims(
      lambda: run_body(dims, _take_all(workers, carry, dims))
    ),
  )

  def goes_on(carry: list[Any]) -> Any:
    own = [*cond_consts, *map(Part, carry, dims)]
    # All workers decide alike.
    return workers.whole(evaluate_parts(params["cond_jaxpr"], own, workers)[0])

  last = lax.while_loop(
    goes_on,
    lambda carry: _take_all(workers, run_body(dims, carry), dims),
    _take_all(workers, carry, dims),
  )
  return list(map(Part, last, dims))


def _cond(
  workers: Workers, step: _flatten.Step, ins: Sequence[Part]
) -> list[Part]:
  """Chooses a branch; results are divided as one of the branches does."""
  index, *operands = workers.settle(ins)
  branches = step.params["branches"]

  def run_branch(branch: Any, arrays: Sequence[Any]) -> list[Part]:
    own = list(map(Part, arrays, _dims(operands)))
    return workers.settle(evaluate_parts(branch, own, workers))

  found = [
    _find_dims(functools.partial(run_branch, branch, _arrays(operands)))
    for branch in branches
  ]
  dims = [
    functools.reduce(_join_dims, each) for each in zip(*found, strict=True)
  ]

  def make_branch(branch: Any) -> Callable[..., list[Any]]:
    return lambda *arrays: _take_all(workers, run_branch(branch, arrays), dims)

  out = lax.switch(
    workers.whole(index), list(map(make_branch, branches)), *_arrays(operands)
  )
  return list(map(Part, out, dims))


def _remat(
  workers: Workers, step: _flatten.Step, ins: Sequence[Part]
) -> list[Part]:
  """Keeps `jax.checkpoint` around a part of the program."""
  params, dims = step.params, _dims(ins)
  found: list[int | None] = []

  def run(*arrays: Any) -> list[Any]:
    own = list(map(Part, arrays, dims))
    out = evaluate_parts(params["jaxpr"], own, workers)
    found[:] = _dims(out)
    return _arrays(out)

  checkpointed = jax.checkpoint(
    run, policy=params["policy"], prevent_cse=params["prevent_cse"]
  )
  out = checkpointed(*_arrays(ins))
  return list(map(Part, out, found))


def _call(
  workers: Workers, step: _flatten.Step, ins: Sequence[Part]
) -> list[Part]:
  """Enters a call that means nothing by itself."""
  (inner,) = _flatten.inner_jaxprs(step.eqn)
  return evaluate_parts(inner, ins, workers)


def _trace_whole(
  workers: Workers, fun: Callable[..., PyTree], *like: PyTree
) -> Any:
  """Traces a function of whole arrays, outside of the map over workers."""
  with jax.sharding.use_abstract_mesh(workers.mesh):
    return jax.make_jaxpr(fun)(*like)


def _likes(variables: Sequence[Any]) -> list[Any]:
  """Returns shapes and dtypes of a program's values."""
  return [core.shape_dtype(v.aval) for v in variables]


def _custom_jvp(
  workers: Workers, step: _flatten.Step, ins: Sequence[Part]
) -> list[Part]:
  """Keeps a function's own derivative, by its trace on whole arrays."""
  ins = workers.settle(ins)
  dims, likes = _dims(ins), _likes(step.eqn.invars)
  own_dims = _find_dims(lambda: workers.settle(_call(workers, step, ins)))
  floats = [i for i, a in enumerate(likes) if core.is_inexact(a)]

  @jax.custom_jvp
  def run(*arrays: Any) -> list[Any]:
    out = _call(workers, step, list(map(Part, arrays, dims)))
    return _take_all(workers, out, own_dims)

  def differentiate(
    primals: Sequence[Any], tangents: Sequence[Any]
  ) -> tuple[Any, Any]:
    given = dict(zip(floats, tangents, strict=True))
    full = [given.get(i, _no_tangent(a)) for i, a in enumerate(likes)]
    return jax.jvp(lambda *args: list(step.run(args)), primals, full)

  @run.defjvp
  def run_jvp(
    primals: Sequence[Any], tangents: Sequence[Any]
  ) -> tuple[list[Any], list[Any]]:
    closed = _trace_whole(
      workers, differentiate, likes, [likes[i] for i in floats]
    )
    own = [Part(tangents[i], dims[i]) for i in floats]
    out = evaluate_parts(closed, [*map(Part, primals, dims), *own], workers)
    count = len(own_dims)
    # A tangent is divided like its value. Integers have none.
    whole = iter(out[count:])
    moved = [
      workers.take(next(whole), d) if core.is_inexact(v.aval) else None
      for d, v in zip(own_dims, step.eqn.outvars, strict=True)
    ]
    values = _take_all(workers, out[:count], own_dims)
    return values, [
      _no_tangent(v) if t is None else t
      for t, v in zip(moved, values, strict=True)
    ]

  return list(map(Part, run(*_arrays(ins)), own_dims))


def _no_tangent(like: Any) -> Any:
  """Returns the tangent of an array of integers."""
  return np.zeros(like.shape, jax.dtypes.float0)


def _custom_vjp(
  workers: Workers, step: _flatten.Step, ins: Sequence[Part]
) -> list[Part]:
  """Keeps a function's own backward pass, by its trace on whole arrays."""
  ins = workers.settle(ins)
  dims, likes = _dims(ins), _likes(step.eqn.invars)
  own_dims = _find_dims(lambda: workers.settle(_call(workers, step, ins)))
  count = len(own_dims)
  pullback: list[Any] = []
  saved_dims: list[int | None] = []

  @jax.custom_vjp
  def run(*arrays: Any) -> list[Any]:
    out = _call(workers, step, list(map(Part, arrays, dims)))
    return _take_all(workers, out, own_dims)

  def pull_forward(*args: Any) -> tuple[list[Any], list[Any]]:
    out, pull = jax.vjp(lambda *a: list(step.run(a)), *args)
    saved, pullback[:] = _flatten_pullback(pull)
    return out, saved

  def run_forward(*arrays: Any) -> tuple[list[Any], Any]:
    closed = _trace_whole(workers, pull_forward, *likes)
    own = list(map(Part, arrays, dims))
    out = workers.settle(evaluate_parts(closed, own, workers))
    saved_dims[:] = _dims(out[count:])
    forward_likes[:] = _likes(closed.jaxpr.outvars[count:])
    return _take_all(workers, out[:count], own_dims), _arrays(out[count:])

  forward_likes: list[Any] = []

  def run_backward(saved: Sequence[Any], cotangents: Sequence[Any]) -> Any:
    pull_back = lambda saved, cts: jax.tree.unflatten(pullback[0], saved)(cts)
    closed = _trace_whole(
      workers, pull_back, forward_likes, _likes(step.eqn.outvars)
    )
    # Cotangents of a value that all workers hold whole are summands.
    own = [
      Part(ct, SUMMAND if d is None else d)
      for ct, d in zip(cotangents, own_dims, strict=True)
    ]
    out = evaluate_parts(closed, [*map(Part, saved, saved_dims), *own], workers)
    return tuple(
      _to_cotangent(workers, part, d) for part, d in zip(out, dims, strict=True)
    )

  run.defvjp(run_forward, run_backward)
  return list(map(Part, run(*_arrays(ins)), own_dims))


def _flatten_pullback(pull: Any) -> tuple[list[Any], list[Any]]:
  """Returns the saved arrays of a backward pass, and its structure."""
  leaves, treedef = jax.tree.flatten(pull)
  return leaves, [treedef]


def _to_cotangent(workers: Workers, part: Part, dim: int | None) -> Any:
  """Returns a worker's cotangent of an operand."""
  if dim is not None:
    return workers.take(part, dim)
  if part.dim == SUMMAND or not core.is_inexact(part.array):
    return part.array
  # Those of all workers are added up.
  return workers.whole(part) / workers.count


_CONTROL: dict[str, _part_rules.Rule] = {
  "checkpoint": _remat,
  "closed_call": _call,
  "cond": _cond,
  "custom_jvp_call": _custom_jvp,
  "custom_vjp_call": _custom_vjp,
  "jit": _call,
  "remat2": _remat,
  "scan": _scan,
  "while": _while,
}
