"""Bytes of payloads and of the collectives that a traced step asks for."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax

from jaxmotion import codecs, core
from jaxmotion.codecs.extend import check_codec, partition
from jaxmotion.core import PyTree
from jaxmotion.program import (
  AXIS_ONLY,
  COLLECTIVES,
  Step,
  Value,
  array_bytes,
  collective_name,
  describe_equation,
  flatten,
  inner_jaxprs,
  open_jaxpr,
)
from jaxmotion.wire import _ledger


class _Context(NamedTuple):
  """Choices of the caller of `step_bytes`, and the mesh axes that are bound."""

  # Workers along every bound axis.
  sizes: Mapping[Any, int]
  # Index of the branch that conditionals take; None: the largest.
  branch: int | None
  # Trips of loops that do not state them.
  while_trips: int | None


@core.declare(
  fn=core.function,
  branch=core.optional(_ledger.COUNT),
  while_trips=core.optional(_ledger.COUNT),
)
def step_bytes(
  fn: Callable[..., Any],
  *args: Any,
  branch: int | None = None,
  while_trips: int | None = None,
) -> _ledger.Ledger:
  """Counts the bytes that one call of a function asks to send.

  The function is traced and never run; its devices need not exist. The count
  is of the explicit collectives in its `shard_map` bodies, in the dtypes the
  program asks for, without those whose results nobody uses. What the compiler
  changes, and what it adds for automatically sharded arrays, is in
  `compiled_bytes`. It changes dtypes, and two equal collectives of equal
  arrays become one: `skip_nonfinite` around `exchange(nonfinite="skip")` asks
  twice for the same sum of 4 bytes.

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
    TypeError: `fn` is not a function, or `args` has a leaf that is no array.
    ValueError: A while loop has a collective and `while_trips` is not given. A
      conditional has no branch of that index. A trace cannot tell the bytes of
      a collective.

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
  if not isinstance(fn, jax.stages.Wrapped):
    # A function that is jitted already may have static arguments.
    core.arrays("args", args)
    fn = jax.jit(fn)
  traced: Any = fn.trace(*args)
  # Stages of `nnx.jit` hold those of JAX.
  jaxpr = getattr(traced, "traced", traced).jaxpr
  context = _Context({}, branch, while_trips)
  return _ledger.Ledger(tuple(_count_moves(jaxpr, None, context)))


def _count_moves(
  jaxpr: Any, used: Sequence[bool] | None, context: _Context
) -> list[_ledger.Move]:
  """Returns the moves of a jaxpr of which only the `used` outputs count."""
  program = flatten(jaxpr, calls="all", used=used, sizes=context.sizes)
  wanted = [v for i, v in enumerate(program.outputs) if used is None or used[i]]
  read = [v for step in program.steps for v in step.reads]
  # A step that is needed may have results that nothing reads. To read a view is
  # to read its source.
  live = {
    id(value)
    for v in (*wanted, *read)
    if isinstance(v, Value)
    for value in (v, v.source)
  }
  return [
    move
    for step in program.steps
    for move in _count_step(step, live, context._replace(sizes=step.sizes))
  ]


def _count_step(
  step: Step, live: set[int], context: _Context
) -> list[_ledger.Move]:
  """Returns the moves of one step, of whose results the `live` are used."""
  eqn, name = step.eqn, collective_name(step.name)
  used = [id(v) in live for v in step.outs]
  if name in COLLECTIVES:
    return _count_collective(step, COLLECTIVES[name])
  if name == "scan":
    return _count_scan(step, used, context)
  if name == "while":
    return _count_while(step, context)
  if name == "cond":
    choices = [_count_moves(b, used, context) for b in eqn.params["branches"]]
    said = describe_equation(eqn, "a conditional")
    # The branches of `lax.platform_dependent` are no choice of the caller's.
    by_platform = eqn.params.get("branches_platforms") is not None
    branch = None if by_platform else context.branch
    return _ledger.pick_branch(choices, branch, said)
  if name not in AXIS_ONLY:
    _check_no_collective(step)
  mesh = dict(getattr(eqn.params.get("mesh"), "shape", {}))
  context = context._replace(sizes={**context.sizes, **mesh})
  return [
    move
    for inner in inner_jaxprs(eqn)
    for move in _count_moves(inner, None, context)
  ]


def _count_scan(
  step: Step, used: list[bool], context: _Context
) -> list[_ledger.Move]:
  """Returns the moves of all trips of a scan with these outputs in use."""
  body = open_jaxpr(step.params["jaxpr"])
  # A carry that is not returned may still feed an output that is. An output
  # that is stacked has one more dimension outside the loop than inside.
  wanted = [
    use or inside.aval.shape == outside.shape
    for use, inside, outside in zip(used, body.outvars, step.outs, strict=True)
  ]
  return _ledger.repeat_moves(
    _count_moves(body, wanted, context), step.params["length"]
  )


def _count_while(step: Step, context: _Context) -> list[_ledger.Move]:
  """Returns the moves of all trips of a while loop."""
  body = _count_moves(step.params["body_jaxpr"], None, context)
  condition = _count_moves(step.params["cond_jaxpr"], None, context)
  said = describe_equation(step.eqn, "a loop")
  return _ledger.repeat_loop(body, condition, context.while_trips, said)


def _count_collective(step: Step, op: str) -> list[_ledger.Move]:
  """Returns a move for each operand of a collective."""
  axes = step.axis_names
  names = [axis for axis in axes if not isinstance(axis, int)]
  if not names:  # `vmap` has turned the collective into a local reduction.
    return []
  unbound = [name for name in names if name not in step.sizes]
  if unbound:
    raise ValueError(f"`fn` must bind its mesh axes, got unbound {unbound}.")
  workers = math.prod(step.sizes[name] for name in names)
  if step.params.get("axis_index_groups") is not None:
    workers = max(map(len, step.params["axis_index_groups"]))
  if op == "collective_permute":
    workers = _ledger.permuted_workers(step.params["perm"])
  # Dimensions that `vmap` made part of the sum do not travel.
  summed = frozenset(axis for axis in axes if isinstance(axis, int))
  labels = tuple(map(str, names))
  avals: list[Any] = [operand.aval for operand in step.eqn.invars]
  return [
    _ledger.Move(
      op, labels, workers, str(aval.dtype), array_bytes(aval, summed), 1
    )
    for aval in avals
  ]


def _check_no_collective(step: Step) -> None:
  """Raises if a step that is not in the table names bound mesh axes."""
  # An unknown collective must be an error: silence would count as 0 bytes.
  name = collective_name(step.name)
  axes = [axis for axis in step.sizes if axis in step.axis_names]
  if axes and not name.endswith("_done"):
    raise ValueError(
      f"`fn` must use collectives of known size, got {name} over {axes}."
    )


@core.declare(
  codec=functools.partial(check_codec, trees=True), like=core.typed_arrays
)
def payload_bytes(codec: codecs.Codec, like: PyTree) -> int:
  """Returns the bytes of the payloads of a tree, from their traced shapes.

  Args:
    codec: any codec.
    like: pytree of floating-point arrays or ShapeDtypeStructs.

  Returns:
    Bytes of all payload buffers of one worker, scales and indices included.

  Raises:
    TypeError: `codec` is not a codec, or a leaf is not floating-point.

  Example:
    >>> import jax.numpy as jnp
    >>> from jaxmotion import codecs
    >>> payload_bytes(codecs.uniform(bits=4, block=512), jnp.zeros(4096))
    2080
  """
  for path, leaf in core.named_leaves(like):
    core.float_array(f"like/{path}" if path else "like", leaf)
  cut = partition(codec, like)
  return sum(
    core.tree_bytes(part.codec.payload_like(array))
    for part, array in zip(cut.leaf_groups, cut.array_likes(), strict=True)
  )
