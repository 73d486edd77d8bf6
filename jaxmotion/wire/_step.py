"""The ledger of a traced function: what a step asks to send."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend import core

from jaxmotion.wire._ledger import (
  Ledger,
  Move,
  check_choices,
  permuted_workers,
  pick_branch,
  repeat,
  repeat_loop,
)

_OPS = {
  "psum": "all_reduce",
  "psum2": "all_reduce",
  "psum_invariant": "all_reduce",
  "pmax": "all_reduce",
  "pmin": "all_reduce",
  "unreduced_psum": "all_reduce",
  "unreduced_pmax": "all_reduce",
  "unreduced_pmin": "all_reduce",
  "all_gather": "all_gather",
  "all_gather_invariant": "all_gather",
  "all_gather_reduced": "all_gather",
  "reduce_scatter": "reduce_scatter",
  "unreduced_reduce_scatter": "reduce_scatter",
  "all_to_all": "all_to_all",
  "ppermute": "collective_permute",
}

# These name a mesh axis and still move nothing.
_QUIET = frozenset(
  (
    "axis_index",
    "pcast",
    "preduced",
    "pvary",
    "reduced_vary_cast",
    "assert_replicated",
    "vary_unreduced_cast",
  )
)

# Their one jaxpr runs once and has the outputs of the equation.
_CALLS = frozenset(
  (
    "checkpoint",
    "closed_call",
    "core_call",
    "custom_jvp_call",
    "custom_vjp_call",
    "eval_jaxpr",
    "jit",
    "pjit",
    "remat2",
    "shard_map",
  )
)


class _Context(NamedTuple):
  sizes: Mapping[Any, int]
  branch: int | None
  while_trips: int | None


def step_bytes(
  fn: Callable[..., Any],
  *args: Any,
  branch: int | None = None,
  while_trips: int | None = None,
) -> Ledger:
  """Counts the bytes that one call of a function asks to send.

  The function is traced and never run; its devices need not exist. The count
  is of the explicit collectives in its `shard_map` bodies, in the dtypes the
  program asks for, without those whose results nobody uses. What the compiler
  changes (dtypes; two equal collectives become one), and what it adds for
  automatically sharded arrays, is in `compiled_bytes`.

  Args:
    fn: The function, jitted or not.
    *args: Its arguments; arrays or `jax.ShapeDtypeStruct`, any shapes.
    branch: Index of the branch that every `cond` and `switch` with a
      collective takes (a `cond` has 0 for false, 1 for true). By default
      each takes the branch that sends the MOST bytes.
    while_trips: Trips of every while loop with a collective. A `scan`, or a
      `fori_loop` with constant bounds, needs none.

  Returns:
    The ledger, in bytes one worker sends.

  Raises:
    ValueError: A while loop has a collective and `while_trips` is not given,
      a conditional has no branch of that index, or a collective is one whose
      bytes a trace cannot tell.

  Example:
    >>> import jax
    >>> from jax.sharding import AbstractMesh, AxisType, PartitionSpec as P
    >>> mesh = AbstractMesh((4,), ("data",), axis_types=(AxisType.Auto,))
    >>> mean = jax.shard_map(
    ...   lambda x: jax.lax.pmean(x, "data"),
    ...   mesh=mesh,
    ...   in_specs=P("data"),
    ...   out_specs=P(),
    ... )
    >>> x = jax.ShapeDtypeStruct((4, 256), "float32")
    >>> step_bytes(mean, x).total_bytes  # 2 (4 - 1) / 4 of 1024 bytes
    1536.0
  """
  check_choices(branch, while_trips)
  traceable = fn if isinstance(fn, jax.stages.Wrapped) else jax.jit(fn)
  jaxpr = traceable.trace(*args).jaxpr
  context = _Context({}, branch, while_trips)
  return Ledger(tuple(_walk(jaxpr, None, context)))


def _walk(
  jaxpr: Any, used: Sequence[bool] | None, context: _Context
) -> list[Move]:
  """The moves of a jaxpr of which only the `used` outputs are wanted."""
  jaxpr = _open(jaxpr)
  if used is None:
    used = [True] * len(jaxpr.outvars)
  live = {id(v) for v, use in zip(jaxpr.outvars, used, strict=True) if use}
  moves: list[list[Move]] = []
  for eqn in reversed(jaxpr.eqns):
    wanted = [id(v) in live for v in eqn.outvars]
    if any(wanted) or _has_side_effect(eqn):
      live.update(map(id, eqn.invars))
      moves.append(_eqn_moves(eqn, wanted, context))
  return [move for block in reversed(moves) for move in block]


def _eqn_moves(eqn: Any, used: list[bool], context: _Context) -> list[Move]:
  name = _canonical(eqn.primitive.name)
  if name in _OPS:
    return _collective(eqn, _OPS[name], context.sizes)
  if name == "scan":
    return _scan(eqn, used, context)
  if name == "while":
    return _while(eqn, context)
  if name == "cond":
    choices = [_walk(b, used, context) for b in eqn.params["branches"]]
    return pick_branch(choices, context.branch, _where(eqn, "a conditional"))
  if name not in _QUIET:
    _check_no_collective(eqn, context.sizes)
  # Of a linear solve's four functions only one is part of the program.
  solve = getattr(eqn.params.get("jaxprs"), "solve", None)
  inner = list(_jaxprs(eqn.params.values())) if solve is None else [solve]
  mesh = dict(getattr(eqn.params.get("mesh"), "shape", {}))
  context = context._replace(sizes={**context.sizes, **mesh})
  outputs = used if name in _CALLS and len(inner) == 1 else None
  return [move for sub in inner for move in _walk(sub, outputs, context)]


def _scan(eqn: Any, used: list[bool], context: _Context) -> list[Move]:
  body = _open(eqn.params["jaxpr"])
  # A carry that is not returned may still feed an output that is. What is
  # not carried is stacked, and so has one more dimension outside than inside.
  wanted = [
    use or inside.aval.shape == outside.aval.shape
    for use, inside, outside in zip(
      used, body.outvars, eqn.outvars, strict=True
    )
  ]
  return repeat(_walk(body, wanted, context), eqn.params["length"])


def _while(eqn: Any, context: _Context) -> list[Move]:
  body = _walk(eqn.params["body_jaxpr"], None, context)
  condition = _walk(eqn.params["cond_jaxpr"], None, context)
  loop = _where(eqn, "a loop", _open(eqn.params["body_jaxpr"]))
  return repeat_loop(body, condition, context.while_trips, loop)


def _collective(eqn: Any, op: str, sizes: Mapping[Any, int]) -> list[Move]:
  axes = _axis_names(eqn.params)
  names = [axis for axis in axes if not isinstance(axis, int)]
  if not names:  # `vmap` has turned the collective into a local reduction.
    return []
  unbound = [name for name in names if name not in sizes]
  if unbound:
    raise ValueError(f"`fn` must bind its mesh axes, got unbound {unbound}.")
  workers = math.prod(sizes[name] for name in names)
  if eqn.params.get("axis_index_groups") is not None:
    workers = max(map(len, eqn.params["axis_index_groups"]))
  if op == "collective_permute":
    workers = permuted_workers(eqn.params["perm"])
  local = {axis for axis in axes if isinstance(axis, int)}
  labels = tuple(map(str, names))
  return [
    Move(op, labels, workers, str(aval.dtype), _array_bytes(aval, local), 1)
    for aval in (operand.aval for operand in eqn.invars)
  ]


def _array_bytes(aval: Any, reduced: set[int]) -> int:
  """Bytes of an array, after the sum over its `reduced` dimensions."""
  kept = (n for axis, n in enumerate(aval.shape) if axis not in reduced)
  bits: int
  if jnp.issubdtype(aval.dtype, jax.dtypes.extended):
    bits = 8 * aval.dtype.itemsize
  else:
    bits = jax.dtypes.itemsize_bits(aval.dtype)
  size: int = math.prod(kept)
  return -(-bits * size // 8)


def _axis_names(params: Mapping[str, Any]) -> tuple[Any, ...]:
  names = params.get("axes", params.get("axis_name", ()))
  return tuple(names) if isinstance(names, (tuple, list)) else (names,)


def _check_no_collective(eqn: Any, sizes: Mapping[Any, int]) -> None:
  # An unknown collective must be an error: silence would count as 0 bytes.
  name = _canonical(eqn.primitive.name)
  named = _axis_names(eqn.params)
  axes = [axis for axis in sizes if axis in named]
  if axes and not name.endswith("_done"):
    raise ValueError(
      f"`fn` must use collectives of known size, got {name} over {axes}."
    )


def _canonical(name: str) -> str:
  """The primitive's name without the marks of its asynchronous form."""
  return name.removesuffix("_p").removesuffix("_start")


def _has_side_effect(eqn: Any) -> bool:
  # Collectives carry the effect of naming an axis, and may yet be dropped.
  return any(type(e).__name__ != "NamedAxisEffect" for e in eqn.effects)


def _jaxprs(values: Iterable[Any]) -> Iterable[core.Jaxpr]:
  for value in values:
    if isinstance(value, (core.Jaxpr, core.ClosedJaxpr)):
      yield _open(value)
    elif isinstance(value, (tuple, list)):
      yield from _jaxprs(value)


def _open(jaxpr: Any) -> Any:
  return getattr(jaxpr, "jaxpr", jaxpr)


def _where(eqn: Any, kind: str, body: Any = None) -> str:
  """What to call an equation in an error, from what the trace remembers."""
  source = getattr(getattr(body, "debug_info", None), "func_src_info", None)
  stack = str(eqn.source_info.name_stack)
  return " ".join(
    filter(None, (kind, source and f"({source})", stack and f"in {stack}"))
  )
