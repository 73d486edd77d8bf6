"""Classifies the arrays of a program and names them.

The kind of an array decides which codec may encode it; the name is what rules
of `compress_residuals` match. ReLU masks are rewritten here, too.
"""

import dataclasses
from collections.abc import Sequence, Set as AbstractSet

import jax
import jax.numpy as jnp
import numpy as np

from jaxmotion import core
from jaxmotion.program import ZERO_PRESERVING, Operand, Program, Step, Value

# Primitives that divide by an operand, and its position; None: by any.
_DIVIDED_BY = {
  "custom_linear_solve": None,
  "digamma": 0,
  "div": 1,
  "lgamma": 0,
  "log": 0,
  "pow": 0,
  "rem": 1,
  "rsqrt": 0,
  "triangular_solve": 0,
  "tridiagonal_solve": None,
}
# Views of an array: a name given to the view is a name of the array.
_VIEWS = ("reshape", "slice", "split")
# Steps that make zeros of zeros.
_COPIES = ("broadcast_in_dim", "convert_element_type", "pcast", "reshape")


def classify_values(program: Program) -> dict[Value, str]:
  """Returns the kind of every value of a program, by which codecs choose."""
  # Known zeros are followed because `max(x, 0)` makes a sparse value, with
  # zeros of its own.
  zeros: set[Value] = set()
  sparse: set[Value] = set()
  for step in program.steps:
    if _makes_zeros(step, zeros):
      zeros.update(step.outs)
    elif _makes_sparse(step, zeros, sparse):
      sparse.update(step.outs)
  values = [*program.inputs, *(v for s in program.steps for v in s.outs)]
  return {v: _value_kind(v, v in sparse) for v in values}


def name_values(
  program: Program,
  input_names: Sequence[str],
  kind: dict[Value, str],
  prefix: str,
) -> dict[Value, str]:
  """Returns the name of every value, "kind/label", as rules match it."""
  # Names depend on the program alone, so they are the same in every run. It may
  # hold codecs already, those of what a loop in it saves.
  label = dict(zip(program.inputs, input_names, strict=False))
  count: dict[str, int] = {}
  depends_on_input = set(program.inputs)
  for step in program.steps:
    depends = not depends_on_input.isdisjoint(step.reads)
    depends_on_input.update(step.outs if depends else ())
    # The codec's constants in a loop (shapes, iotas) are outputs of the scan
    # that no argument changes. Counting them as "constant" keeps the numbers
    # of the other primitives independent of the codec.
    name = step.name if depends else "constant"
    number = count[name] = count.get(name, -1) + 1
    for i, value in enumerate(step.outs):
      label[value] = f"{name}_{number}_{i}" if i else f"{name}_{number}"
      for source in step.reads if step.name in _VIEWS else ():
        # Encoded buffers that a loop returns are laid out by views: each view
        # keeps the name of the scan's output.
        if label.get(source, "").startswith("scan_"):
          label[value] = label[source]
    if step.name == "name":  # `checkpoint_name`, which returns its operand.
      label.update(
        dict.fromkeys((step.outs[0], *step.reads), step.params["name"])
      )
  return {v: f"{kind[v]}/{prefix}{label[v]}" for v in kind if v in label}


def find_divisors(program: Program) -> set[Value]:
  """Returns the values that a step divides by, or that are zero if one is."""
  # Rounded to zero, such a value makes a gradient infinite.
  divisors: set[Value] = set()
  for step in reversed(program.steps):
    if step.name in _DIVIDED_BY:
      index = _DIVIDED_BY[step.name]
      used = step.ins if index is None else step.ins[index : index + 1]
      divisors.update(v for v in used if isinstance(v, Value))
    is_inverse = step.name == "integer_pow" and step.params["y"] < 0
    is_zero_with_operand = step.name in ZERO_PRESERVING or step.name in (
      "div",
      "integer_pow",
      "optimization_barrier",
    )
    makes_divisor = not divisors.isdisjoint(step.outs)
    if is_inverse or (is_zero_with_operand and makes_divisor):
      divisors.update(step.reads)
  return divisors


def reuse_relu_outputs(program: Program) -> Program:
  """Rewrites ReLU masks `operand > 0` as `result > 0`."""
  # JAX's gradient of ReLU compares the operand with zero. The same comparison
  # of the result gives the same mask, so a backward pass that has the result
  # (which the next layer's gradient needs anyway) saves no mask.
  zeros: set[Value] = set()
  result: dict[Operand, Value] = {}
  steps = []
  for step in program.steps:
    if _makes_zeros(step, zeros):
      zeros.update(step.outs)
    operand = _relu_operand(step, zeros)
    if operand is not None:
      result.setdefault(operand, step.outs[0])
    elif step.name == "gt" and _is_zero(step.ins[1], zeros):
      compared = step.ins[0]
      if isinstance(compared, Value) and compared in result:
        ins = (result[compared], step.ins[1])
        step = dataclasses.replace(step, ins=ins)
    steps.append(step)
  return program._replace(steps=tuple(steps))


def _relu_operand(step: Step, zeros: AbstractSet[Value]) -> Value | None:
  """Returns the operand of a ReLU; None if the step is something else."""
  if step.name == "custom_jvp_call":
    inner = core.jax_core.jaxprs_in_params(step.params)
    is_relu = all(map(_is_relu, inner))
  else:
    is_relu = step.name == "max" and any(_is_zero(v, zeros) for v in step.ins)
  operands = [v for v in step.reads if v not in zeros] if is_relu else []
  return operands[0] if len(operands) == 1 else None


def _is_relu(jaxpr: core.jax_core.Jaxpr) -> bool:
  """Says whether a jaxpr is nothing but a maximum with zero."""
  if len(jaxpr.eqns) != 1:
    return False
  (eqn,) = jaxpr.eqns
  if eqn.primitive.name in ("jit", "pjit"):
    return all(map(_is_relu, core.jax_core.jaxprs_in_params(eqn.params)))
  literals = [v for v in eqn.invars if isinstance(v, core.jax_core.Literal)]
  is_zero = any(_is_zero(v, set()) for v in literals)
  return eqn.primitive.name == "max" and is_zero


def _value_kind(value: Value, is_sparse: bool) -> str:
  """Returns the kind of a value from its dtype and its sparsity."""
  dtype = getattr(value.aval, "dtype", None)
  if dtype is None:
    return "other"
  if dtype == jnp.bool_:
    return "mask"
  if jnp.issubdtype(dtype, jnp.integer):
    return "integer"
  if jnp.issubdtype(dtype, jnp.floating):
    return "sparse" if is_sparse else "dense"
  return "other"


def _makes_zeros(step: Step, zeros: AbstractSet[Value]) -> bool:
  """Says whether every element of a step's result is zero."""
  return step.name in _COPIES and all(_is_zero(v, zeros) for v in step.ins[:1])


def _is_zero(operand: Operand, zeros: AbstractSet[Value]) -> bool:
  """Says whether an operand is a literal zero or a known array of zeros."""
  if isinstance(operand, core.jax_core.Literal):
    # The cotangents of integers are float0, which compares with nothing.
    if getattr(operand.aval, "dtype", None) == jax.dtypes.float0:
      return False
    return bool(np.ndim(operand.val) == 0 and operand.val == 0)
  return operand in zeros


def _makes_sparse(
  step: Step, zeros: AbstractSet[Value], sparse: AbstractSet[Value]
) -> bool:
  """Says whether a step is ReLU or preserves the zeros of its operands."""
  # Of `max`, `mul` and `select_n`, one sparse operand is enough: a maximum with
  # zero is ReLU, a product with zero is zero, and a selection from zeros has
  # zeros. Of other zero-preserving primitives, all operands must be sparse.
  if step.name == "custom_jvp_call":
    (inner, *_) = core.jax_core.jaxprs_in_params(step.params)
    return _is_relu(inner)
  if step.name not in ZERO_PRESERVING:
    return False
  are_sparse = [_is_zero(v, zeros) or _is_zero(v, sparse) for v in step.ins]
  if step.name in ("max", "mul", "select_n"):
    return any(are_sparse)
  return bool(are_sparse) and all(are_sparse)
