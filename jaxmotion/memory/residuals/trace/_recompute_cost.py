"""What is cheap enough to be computed twice."""

from typing import Any

import jax.numpy as jnp
from jax.extend import core

# One pass over memory at most, which the pass that reads the result swallows.
# Reductions are left out: they read much and leave little.
_CHEAP = frozenset(
  """
  abs acos acosh add add_any and asin asinh atan atan2 atanh
  bitcast_convert_type broadcast_in_dim cbrt ceil clamp clz complex
  concatenate conj convert_element_type copy copy_p cos cosh device_put
  digamma div dynamic_slice empty2 eq eq_to erf erf_inv erfc exp exp2
  expand_dims expm1 floor ge gt imag integer_pow iota is_finite le le_to
  lgamma log log1p log2 logistic lt lt_to max min mul name ne neg nextafter
  not one_minus_square or pad pcast polynomial population_count pow pvary real
  reduce_precision rem reshape rev round rsqrt assert_replicated select_n
  sharding_constraint shift_left shift_right_arithmetic shift_right_logical
  sign sin sinh slice split sqrt square squeeze stop_gradient sub tan tanh
  transpose unstack xor
  """.split()
)
# Calls whose cost is that of what they call.
_CALLS = frozenset(("custom_jvp_call", "jit", "pjit", "closed_call"))


def is_expensive(eqn: core.JaxprEqn) -> bool:
  """Says whether a backward pass should not do this again.

  What is not known to be cheap is costly: products, convolutions, loops,
  reductions, sorts, random bits, collectives, kernels, custom calls.
  """
  name = eqn.primitive.name
  if name in _CALLS:
    inner = core.jaxprs_in_params(eqn.params)
    return any(is_expensive(e) for jaxpr in inner for e in jaxpr.eqns)
  return name not in _CHEAP


# A small change of their operands can be a large one of their results.
_STEEP = frozenset(
  """
  argmax argmin ceil eq eq_to floor ge gt is_finite le le_to lt lt_to ne round
  sign
  """.split()
)


def is_discontinuous(eqn: core.JaxprEqn) -> bool:
  """Says whether this must not be done again on values that were rounded.

  A rectifier's mask, for one: of the values that are rounded to zero, which
  is 1 % at 8 bits and 15 % at 4, it would stop the gradient.
  """
  return eqn.primitive.name in _STEEP


_EQUALITY = frozenset(("eq", "eq_to", "ne"))


def is_exact_equality(eqn: core.JaxprEqn) -> bool:
  """Says whether this must not be done again at all.

  Whether two floats are equal, as the gradient of a maximum asks: a value that
  XLA computes in two places may differ by a rounding, and then equals nothing.
  """
  if eqn.primitive.name not in _EQUALITY:
    return False
  aval: Any = eqn.invars[0].aval
  return bool(jnp.issubdtype(aval.dtype, jnp.inexact))
