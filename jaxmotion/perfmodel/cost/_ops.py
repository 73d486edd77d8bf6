"""What one operation is and how many FLOPs it takes."""

from __future__ import annotations

import functools
import math
from typing import Any

import numpy as np

from jaxmotion.perfmodel.cost._flat_program import VIEWS, Node

KINDS = (
  "matmul",
  "convolution",
  "elementwise",
  "reduction",
  "data_movement",
  "gather_scatter",
  "random",
  "collective",
  "other",
)

# One result from the operands' values at the same place.
_ARITHMETIC = frozenset(
  """
  abs add add_any and ceil clamp clz conj convert_element_type eq eq_to
  floor ge gt imag is_finite le le_to lt lt_to max min mul mulhi ne neg
  nextafter not or population_count real reduce_precision rem round select_n
  shift_left shift_right_arithmetic shift_right_logical sign square sub xor
  """.split()
)
# Compilers write these to memory rather than compute them twice.
COSTLY = frozenset(
  """
  acos acosh asin asinh atan atan2 atanh bessel_i0e bessel_i1e cbrt complex
  cos cosh digamma div erf erf_inv erfc exp exp2 expm1 igamma igammac lgamma
  log log1p logistic polygamma pow random_gamma_grad
  regularized_incomplete_beta rsqrt sin sinh sqrt tan tanh zeta
  """.split()
)
# They move values and fuse with arithmetic all the same.
_MOVED = frozenset(
  """
  bitcast_convert_type broadcast_in_dim concatenate iota pad rev stack
  """.split()
)
_REDUCED = frozenset(
  """
  argmax argmin reduce reduce_and reduce_max reduce_min reduce_or reduce_prod
  reduce_sum reduce_xor
  """.split()
)
_SCANS = frozenset("cumlogsumexp cummax cummin cumprod cumsum".split())
_WINDOWS = frozenset(
  """
  reduce_window reduce_window_max reduce_window_min reduce_window_sum
  """.split()
)
_PICKED = frozenset("select_and_gather_add select_and_scatter_add".split())
_RANDOM = frozenset(
  "random_bits random_fold_in random_seed random_split threefry2x32".split()
)
_QUIET = frozenset("axis_index platform_index".split())
# Sums of so few values (the codes of a word) are computed where they are read.
_FEW = 32
# Threefry-2x32 makes two words of 20 rounds (add, rotate, xor: 5 operations),
# 5 key injections (3) and 2 additions.
_RANDOM_WORD_FLOPS = (20 * 5 + 5 * 3 + 2) / 2


def kind_of(node: Node) -> str:
  """The class of an operation, one of `KINDS`."""
  name = node.name
  if name == "dot_general":
    return "matmul"
  if name == "conv_general_dilated":
    return "convolution"
  if name in _REDUCED | _SCANS | _WINDOWS | _PICKED:
    return "reduction"
  if is_fusible(node):
    return "data_movement" if name in _MOVED else "elementwise"
  if name == "gather" or name.startswith("scatter"):
    return "gather_scatter"
  if name in VIEWS or name == "dynamic_update_slice":
    return "data_movement"
  if name in _RANDOM:
    return "random"
  return "collective" if is_collective(node) else "other"


def is_fusible(node: Node) -> bool:
  """Whether it computes each value where, and when, that value is read."""
  name = node.name
  if is_reduction(node):
    return len(node.outs) == 1 and _in_size(node) <= _FEW * node.outs[0].size
  return name in _ARITHMETIC | COSTLY | _MOVED or name == "integer_pow"


def is_reduction(node: Node) -> bool:
  """Whether it reads values as they are computed, and writes few."""
  return node.name in _REDUCED


def is_collective(node: Node) -> bool:
  """Whether it names an axis of workers and moves something over it."""
  params = node.params
  names = params.get("axes", params.get("axis_name", ()))
  names = names if isinstance(names, (tuple, list)) else (names,)
  bound = any(isinstance(name, str) for name in names)
  return bound and node.name not in VIEWS | _QUIET


def is_known(node: Node) -> bool:
  """Whether `flops_of` knows what it takes."""
  special = ("sort", "top_k", "fft")
  return kind_of(node) != "other" or node.name in _QUIET or node.name in special


def flops_of(node: Node) -> float:
  """FLOPs of an operation: 1 an element unless a line here says otherwise."""
  name, size = node.name, node.outs[0].size if node.outs else 0
  if name == "dot_general":
    return _dot(node)
  if name == "conv_general_dilated":
    return _convolution(node)
  if name in _ARITHMETIC | COSTLY | _SCANS:
    return size
  if name == "integer_pow":
    power = abs(node.params["y"])
    return size * max(power.bit_length() + power.bit_count() - 2, 0)
  if name in _REDUCED:
    folds = len(open_eqns(node)) if name == "reduce" else 1
    return folds * max(_in_size(node) - size, 0)
  if name in _WINDOWS:
    return size * (math.prod(node.params["window_dimensions"]) - 1)
  if name in _PICKED:  # One operand has a value for each window.
    windows = min(v.size for v in (*node.ins, *node.outs) if v is not None)
    return windows * math.prod(node.params["window_dimensions"])
  if name.startswith("scatter") and name != "scatter":
    return node.ins[2].size if node.ins[2] else 1
  if name in _RANDOM:
    return _RANDOM_WORD_FLOPS * sum(v.nbytes for v in node.outs) / 4
  return _special(node)


def open_eqns(node: Node) -> list[Any]:
  """The equations that fold two values into one."""
  return node.params["jaxpr"].eqns


def _special(node: Node) -> float:
  n = _in_size(node)
  if node.name == "sort":
    length = node.ins[0].shape[node.params["dimension"]] if node.ins[0] else 1
    return n * math.log2(max(length, 1))
  if node.name == "top_k":
    return n * math.log2(node.params["k"] + 1)
  if node.name == "fft":
    return 5 * n * sum(map(math.log2, node.params["fft_lengths"]))
  return 0.0


def _in_size(node: Node) -> int:
  return max((v.size for v in node.ins if v is not None), default=0)


def _dot(node: Node) -> float:
  (contracted, _), _ = node.params["dimension_numbers"]
  lhs = node.ins[0]
  depth = math.prod(lhs.shape[i] for i in contracted) if lhs else 1
  return 2 * node.outs[0].size * depth


def _convolution(node: Node) -> float:
  """2 FLOPs for each product of a value with a weight.

  Padding and the zeros that dilation puts between values are not multiplied:
  the forward pass and both gradients then take exactly the same.
  """
  params = node.params
  numbers = params["dimension_numbers"]
  lhs, rhs = node.ins[0], node.ins[1]
  assert lhs and rhs
  out = node.outs[0]
  channels = rhs.shape[numbers.rhs_spec[1]]  # of one group
  products = out.shape[numbers.out_spec[0]] * out.shape[numbers.out_spec[1]]
  for i, (low, _) in enumerate(params["padding"]):
    products *= _places(
      out.shape[numbers.out_spec[2 + i]],
      rhs.shape[numbers.rhs_spec[2 + i]],
      lhs.shape[numbers.lhs_spec[2 + i]],
      params["window_strides"][i],
      low,
      params["lhs_dilation"][i],
      params["rhs_dilation"][i],
    )
  return 2 * products * channels


@functools.lru_cache(maxsize=4096)
def _places(
  outs: int, taps: int, ins: int, stride: int, low: int, spread: int, step: int
) -> int:
  """Pairs (output, tap) of one dimension that meet a value of the input."""
  starts = np.arange(outs) * stride - low
  place = starts[:, None] + np.arange(taps) * step
  inside = (place >= 0) & (place <= (ins - 1) * spread)
  return int(np.sum(inside & (place % spread == 0)))
