"""What values are called and what is known of them."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core

from jaxmotion.program import Operand, Program, Step, Value

_VIEWS = ("reshape", "slice", "split")
# Zeros stay zeros.
_KEEP_ZEROS = frozenset(
  """
  abs bitcast_convert_type broadcast_in_dim concatenate convert_element_type
  copy copy_p expand_dims max mul name neg pcast pvary reduce_precision
  reduce_window_max reshape rev select_n sharding_constraint slice split sqrt
  square squeeze stop_gradient transpose
  """.split()
)


def kinds(program: Program) -> dict[Value, str]:
  """Says of every value what sort of array it is.

  Returns:
    "mask" (booleans), "integer", "sparse" (floats that a rectifier, or what
    keeps its zeros, has made), "dense" (other floats) or "other".
  """
  zero: set[Value] = set()
  sparse: set[Value] = set()
  for step in program.steps:
    if _is_zero(step, zero):
      zero.update(step.outs)
    elif _is_sparse(step, zero, sparse):
      sparse.update(step.outs)
  values = [*program.inputs, *(v for s in program.steps for v in s.outs)]
  return {v: _kind(v, v in sparse) for v in values}


def names(
  program: Program,
  inputs: Sequence[str],
  kind: dict[Value, str],
  prefix: str,
) -> dict[Value, str]:
  """Names every value: its kind, and where it is from.

  Args:
    program: all of it.
    inputs: names of the inputs.
    kind: of every value.
    prefix: of where it is from.

  Returns:
    "kind/argument", "kind/label" of what `checkpoint_name` has labelled, or
    "kind/primitive_number", the number counting the steps of that primitive;
    "kind/constant_number" of what depends on no argument.
  """
  label = dict(zip(program.inputs, inputs, strict=False))
  count: dict[str, int] = {}
  moving = set(program.inputs)
  for step in program.steps:
    moves = any(v in moving for v in step.reads)
    moving.update(step.outs if moves else ())
    # Loops hand out what their codecs need and no argument changes.
    name = step.name if moves else "constant"
    number = count[name] = count.get(name, -1) + 1
    for i, value in enumerate(step.outs):
      place = f"{number}_{i}" if i else f"{number}"
      label[value] = f"{name}_{place}"
      for source in step.reads if step.name in _VIEWS else ():
        if label.get(source, "").startswith("scan_"):
          label[value] = label[source]  # Words of a loop, laid out.
    if step.name == "name":
      label[step.outs[0]] = step.eqn.params["name"]
      for value in step.reads:
        label[value] = step.eqn.params["name"]
  return {v: f"{kind[v]}/{prefix}{label[v]}" for v in kind if v in label}


def rectified(program: Program) -> Program:
  """Has masks of rectifiers made of what rectifiers return.

  JAX compares their operand with zero, which the same comparison of their
  result equals: whoever has the result needs no mask.
  """
  zero: set[Value] = set()
  result: dict[Value, Value] = {}
  steps = []
  for step in program.steps:
    if _is_zero(step, zero):
      zero.update(step.outs)
    operand = _rectified(step, zero)
    if operand is not None:
      result.setdefault(operand, step.outs[0])
    elif step.name == "gt" and _zero(step.ins[1], zero):
      before = step.ins[0]
      if isinstance(before, Value) and before in result:
        step = step.with_operands((result[before], step.ins[1]))
    steps.append(step)
  return program._replace(steps=tuple(steps))


def _rectified(step: Step, zero: set[Value]) -> Value | None:
  """Returns what a step takes the maximum with zero of."""
  if step.name == "custom_jvp_call":
    inner = core.jaxprs_in_params(step.eqn.params)
    ends = step.ins if all(map(_rectifies, inner)) else ()
  else:
    ends = step.ins if step.name == "max" else ()
  if step.name == "max" and not any(_zero(v, zero) for v in ends):
    return None
  found = [v for v in ends if isinstance(v, Value) and not _zero(v, zero)]
  return found[0] if len(found) == 1 else None


def _kind(value: Value, sparse: bool) -> str:
  dtype = getattr(value.aval, "dtype", None)
  if dtype is None:
    return "other"
  if dtype == jnp.bool_:
    return "mask"
  if jnp.issubdtype(dtype, jnp.integer):
    return "integer"
  if jnp.issubdtype(dtype, jnp.floating):
    return "sparse" if sparse else "dense"
  return "other"


def _is_zero(step: Step, zero: set[Value]) -> bool:
  """Says whether all of a step's result is zero."""
  moves = ("broadcast_in_dim", "convert_element_type", "pcast", "reshape")
  return step.name in moves and all(_zero(v, zero) for v in step.ins[:1])


def _zero(operand: Operand, zero: set[Value]) -> bool:
  if isinstance(operand, core.Literal):
    # The cotangents of integers are of a dtype that is compared with nothing.
    if getattr(operand.aval, "dtype", None) == jax.dtypes.float0:
      return False
    return bool(np.ndim(operand.val) == 0 and operand.val == 0)
  return operand in zero


def _is_sparse(step: Step, zero: set[Value], sparse: set[Value]) -> bool:
  if step.name == "custom_jvp_call":
    (inner, *_) = core.jaxprs_in_params(step.eqn.params)
    return _rectifies(inner)
  if step.name not in _KEEP_ZEROS:
    return False
  found = [_zero(v, zero) or _zero(v, sparse) for v in step.ins]
  if step.name in ("max", "mul", "select_n"):
    return any(found)
  return bool(found) and all(found)


def _rectifies(jaxpr: core.Jaxpr) -> bool:
  """Says whether all a function does is a maximum with zero."""
  if len(jaxpr.eqns) != 1:
    return False
  (eqn,) = jaxpr.eqns
  if eqn.primitive.name in ("jit", "pjit"):
    return all(map(_rectifies, core.jaxprs_in_params(eqn.params)))
  ends = [v for v in eqn.invars if isinstance(v, core.Literal)]
  return eqn.primitive.name == "max" and any(_zero(v, set()) for v in ends)
