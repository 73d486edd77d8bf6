"""Table of JAX's primitives: one class each, and what a class allows.

Every room that reads traced programs asks this table. Two users may need
different answers about one primitive; the table gives both:

* `TRANSCENDENTAL` elements are written to memory rather than computed by two
  kernels: a compiler fuses an addition into every reader, an `exp` into one.
  Yet `is_expensive` does not hold for them. A backward pass computes them again
  in a pass over memory that the reader makes anyway. Saving them takes memory
  for the whole step.
* `SPECIAL` functions are written rather than computed twice, too, but their
  series and iterations are too long to run again.
* Calls in `TRANSPARENT_CALLS` mean nothing: where a jitted function begins and
  ends is not part of the computation. Other `CALLS` have a meaning of their
  own (a differentiation rule, rematerialization, a mesh); who counts enters
  them, who transforms leaves them whole.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxmotion import core

TRANSPARENT_CALLS = frozenset("closed_call jit".split())
# The one jaxpr that these hold runs once, on their operands.
CALLS = TRANSPARENT_CALLS | frozenset(
  "call custom_jvp_call custom_vjp_call eval_jaxpr remat2 shard_map".split()
)
LOOPS = frozenset("cond scan while".split())
# Their results name what is in memory already: who reads them reads that.
VIEWS = frozenset(
  """
  assert_replicated bitcast_convert_type copy copy_p dynamic_slice expand_dims
  name optimization_barrier pcast pvary random_unwrap random_wrap reshape
  sharding_constraint slice split squeeze stop_gradient transpose unstack
  """.split()
)
# One result from the operands' elements at the same position.
ARITHMETIC = frozenset(
  """
  abs add add_any and ceil clamp clz conj convert_element_type eq eq_to
  floor ge gt imag is_finite le le_to lt lt_to max min mul mulhi ne neg
  nextafter not one_minus_square or population_count real reduce_precision rem
  round select_n shift_left shift_right_arithmetic shift_right_logical sign
  square sub xor
  """.split()
)
# Likewise, by a division, a series or a table.
TRANSCENDENTAL = frozenset(
  """
  acos acosh asin asinh atan atan2 atanh cbrt complex cos cosh digamma div erf
  erf_inv erfc exp exp2 expm1 lgamma log log1p log2 logistic polynomial pow
  rsqrt sin sinh sqrt tan tanh
  """.split()
)
# Likewise, by so many operations that no backward pass should repeat them.
SPECIAL = frozenset(
  """
  bessel_i0e bessel_i1e igamma igamma_grad_a igammac polygamma random_gamma_grad
  regularized_incomplete_beta zeta
  """.split()
)
# They move elements and fuse with arithmetic all the same.
MOVEMENT = frozenset("broadcast_in_dim concatenate iota pad rev stack".split())
REDUCTIONS = frozenset(
  """
  argmax argmin reduce reduce_and reduce_max reduce_min reduce_or reduce_prod
  reduce_sum reduce_xor
  """.split()
)
CUMULATIVE = frozenset("cumlogsumexp cummax cummin cumprod cumsum".split())
WINDOWS = frozenset(
  """
  reduce_window reduce_window_max reduce_window_min reduce_window_sum
  """.split()
)
# One element of each window, or to each window.
WINDOW_PICKS = frozenset(
  "select_and_gather_add select_and_scatter select_and_scatter_add".split()
)
RANDOM = frozenset(
  "random_bits random_fold_in random_seed random_split threefry2x32".split()
)
# The collective of the wire ledger that each one is.
COLLECTIVES = {
  "psum": "all_reduce",
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
AXIS_ONLY = frozenset(
  """
  assert_replicated axis_index pcast preduced pvary reduced_vary_cast
  vary_unreduced_cast
  """.split()
)
# A small change of an operand can be a large one of the result.
DISCONTINUOUS = frozenset(
  """
  argmax argmin ceil eq eq_to floor ge gt is_finite le le_to lt lt_to ne round
  sign
  """.split()
)
_EQUALITIES = frozenset("eq eq_to ne".split())
# They turn zeros into zeros: sparse operands give sparse results.
ZERO_PRESERVING = frozenset(
  """
  abs bitcast_convert_type broadcast_in_dim concatenate convert_element_type
  copy copy_p expand_dims max mul name neg pcast pvary reduce_precision
  reduce_window_max reshape rev select_n sharding_constraint slice split sqrt
  square squeeze stop_gradient transpose
  """.split()
)
# Neither arithmetic nor views, and yet nothing to do again: places.
_MARKS = frozenset("device_put empty2 integer_pow".split())
# A barrier is there to keep two computations apart; keys are made once.
_KEPT_VIEWS = frozenset(
  "optimization_barrier random_unwrap random_wrap".split()
)
# One pass over memory at most, which the pass that reads the result swallows.
# Reductions are left out: they read much and leave little.
CHEAP = ARITHMETIC | TRANSCENDENTAL | MOVEMENT | _MARKS | (VIEWS - _KEPT_VIEWS)
# The jaxprs of primitives whose names begin so fold or compare two elements:
# they are no parts of the program.
FOLDING = ("reduce", "scatter", "select_and", "sort", "argmax", "argmin")


def writes_in_place(name: str) -> bool:
  """Says whether a primitive changes part of its first operand where it is.

  >>> writes_in_place("scatter-add"), writes_in_place("gather")
  (True, False)
  """
  return name.startswith(("scatter", "dynamic_update_slice"))


def collective_name(name: str) -> str:
  """Returns a primitive's name without the marks of its asynchronous form.

  >>> collective_name("all_gather_start"), collective_name("pvary_p")
  ('all_gather', 'pvary')
  """
  return name.removesuffix("_p").removesuffix("_start")


def is_expensive(eqn: core.jax_core.JaxprEqn) -> bool:
  """Says whether a backward pass should not compute an equation again."""
  # Whatever the table does not know to be cheap is expensive: matmuls,
  # convolutions, loops, reductions, sorts, random bits, collectives, kernels,
  # custom calls.
  name = eqn.primitive.name
  if name in TRANSPARENT_CALLS or name == "custom_jvp_call":
    # A call is expensive if anything that it calls is.
    inner = core.jax_core.jaxprs_in_params(eqn.params)
    return any(is_expensive(e) for jaxpr in inner for e in jaxpr.eqns)
  return name not in CHEAP


def is_discontinuous(eqn: core.jax_core.JaxprEqn) -> bool:
  """Says whether an equation must not be recomputed from rounded operands."""
  # A rounding error in an operand can flip the result. Recomputed, the mask of
  # a ReLU would stop the gradient of all elements that round to zero. These are
  # 1 % at 8 bits, 15 % at 4.
  return eqn.primitive.name in DISCONTINUOUS and not _finds_infinity(eqn)


def is_float_equality(eqn: core.jax_core.JaxprEqn) -> bool:
  """Says whether an equation compares floats for equality."""
  # Such an equation must not be recomputed at all, as in the gradient of a
  # maximum. An operand that XLA computes in two places may differ by a
  # rounding, and then equals nothing.
  # A value that is compared with infinity or with itself may be recomputed: no
  # rounding makes it infinite or NaN.
  if eqn.primitive.name not in _EQUALITIES or _finds_infinity(eqn):
    return False
  aval: Any = eqn.invars[0].aval
  return bool(jnp.issubdtype(aval.dtype, jnp.inexact))


def _finds_infinity(eqn: core.jax_core.JaxprEqn) -> bool:
  """Says whether an equation compares for equality with infinity or itself."""
  if eqn.primitive.name not in _EQUALITIES:
    return False
  operands = eqn.invars
  literals = [v for v in operands if isinstance(v, core.jax_core.Literal)]
  return operands[0] is operands[1] or any(np.isinf(v.val) for v in literals)
