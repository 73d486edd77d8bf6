"""Every codec, with the bound its docstring states: a new codec is a new row.

A bound maps |x| of the whole array to the greatest error of each value.
"""

import numpy as np

from jaxmotion import codecs

_TINY = 1e-37


def steps(count, most):
  """Levels `1 / count` of the peak apart, off by at most `most` steps."""
  return lambda a: a.max(initial=0) / count * most * (1 + 1e-4) + _TINY


def relative(fraction, floor=_TINY):
  return lambda a: a * fraction * (1 + 1e-6) + floor


def lossless(a):
  return np.zeros_like(a)


def uniform_row(bits, **fields):
  codec = codecs.uniform(bits=bits, **fields)
  symmetric = fields.get("symmetric", True)
  count = 2 ** (bits - 1) - 1 if symmetric and bits > 1 else 1 / 2
  if not symmetric:
    count = (2**bits - 1) / 2
  most = 1.0 if codec.needs_key else 0.5
  return codec, steps(count, most)


def mx_row(form, mantissa):
  """The greatest magnitude sets the scale, so it bounds every error."""
  # Half a unit in the last place of the greatest binade, or a saturated top.
  return (
    codecs.microscaling(format=form),
    lambda a: a.max(initial=0) * 2.0**-mantissa + _TINY,
  )


CODECS = {
  "identity": (codecs.identity(), lossless),
  "bf16": (codecs.cast("bfloat16"), relative(2**-8)),
  "f16": (codecs.cast("float16"), None),
  "e4m3": (codecs.cast("float8_e4m3fn"), None),
  "e5m2": (codecs.cast("float8_e5m2"), None),
  "truncate1": (codecs.truncate(bytes=1), relative(3 / 4)),
  "truncate2": (codecs.truncate(bytes=2), relative(2**-7)),
  "truncate3": (codecs.truncate(bytes=3), relative(2**-15)),
  "truncate4": (codecs.truncate(bytes=4), lossless),
  "truncate2_nearest": (
    codecs.truncate(bytes=2, rounding="nearest"),
    relative(2**-8),
  ),
  "int8": uniform_row(8),
  "int8_stochastic": uniform_row(8, rounding="stochastic"),
  "int8_minmax": uniform_row(8, symmetric=False, block=64),
  "int7": uniform_row(7, block=33),
  "int6": uniform_row(6),
  "int5_minmax": uniform_row(5, symmetric=False),
  "int4": uniform_row(4, block=64),
  "int4_stochastic": uniform_row(4, rounding="stochastic"),
  "int3": uniform_row(3),
  "int2": uniform_row(2, block=16),
  "int1": uniform_row(1),
  "int1_minmax": uniform_row(1, symmetric=False),
  "sign": (codecs.sign(block=64), steps(1, 1)),
  "topk": (codecs.topk(density=0.1), relative(1)),
  "topk_block": (codecs.topk(density=0.1, block=40), relative(1)),
  "topk_many": (codecs.topk(density=0.5, block=64), relative(1)),
  "topk_int8": (
    codecs.chain(codecs.topk(density=0.1), codecs.uniform(bits=8)),
    steps(1, 1),
  ),
  "ternary": (codecs.ternary(block=64), steps(1, 1)),
  "ternary_threshold": (
    codecs.ternary(block=64, rounding="threshold"),
    steps(1, 1),
  ),
  "mxfp8_e4m3": mx_row("float8_e4m3fn", 3),
  "mxfp8_e5m2": mx_row("float8_e5m2", 2),
  "mxfp6_e3m2": mx_row("float6_e3m2fn", 2),
  "mxfp6_e2m3": mx_row("float6_e2m3fn", 3),
  "mxfp4": mx_row("float4_e2m1fn", 1),
  # Of a negative value nothing is left; test_nonnegative has the bound.
  "nonnegative": (codecs.nonnegative(block=64), relative(1)),
  "random_k": (codecs.random_k(density=0.3), None),
  "random_k_plain": (
    codecs.random_k(density=0.3, scaled=False),
    relative(1),
  ),
  "threshold": (codecs.threshold(value=1.0, capacity=0.5), relative(1)),
  "zero_value": (codecs.zero_value(capacity=1.0), lossless),
  "zero_value_half": (codecs.zero_value(capacity=0.5, tile=64), relative(1)),
  "rotate": (codecs.rotate(block=32), steps(2**9, 1)),
  "rotate_int4": (
    codecs.chain(codecs.rotate(block=64), codecs.uniform(bits=4)),
    None,
  ),
  "random_k_int8": (
    codecs.chain(codecs.random_k(density=0.3), codecs.uniform(bits=8)),
    None,
  ),
  "int4_feedback": (codecs.feedback(codecs.uniform(bits=4)), steps(7, 0.5)),
  "topk_feedback": (
    codecs.feedback(codecs.topk(density=0.1), decay=0.9),
    relative(1),
  ),
}


# Rows that run the code of another row, with another width, format or density.
# Round trips and frozen payloads hold them. Suites that compile programs for
# every codec take the other rows.
VARIANTS = frozenset(
  """
  f16 e5m2 truncate2 truncate4 int8_stochastic int7 int6 int3 int1_minmax
  topk_many mxfp8_e5m2 mxfp6_e2m3 mxfp4 random_k_plain zero_value rotate
  random_k_int8
  """.split()
)
KINDS = [name for name in CODECS if name not in VARIANTS]


# These add values up, which no two programs do in the same order.
ULPS = {"sign": 8, "ternary_threshold": 8, "rotate": 16, "rotate_int4": 16}


ARRAYS = {
  "scalar": np.float32(1.5),
  "empty": np.zeros((0,), np.float32),
  "one": np.array([-0.25], np.float32),
  "odd": np.random.default_rng(0).normal(size=(37, 29)).astype(np.float32),
  "zeros": np.zeros((65,), np.float32),
  "huge": np.array([3e38, -3e38, 1e38, 0.0, -1.0] * 13, np.float32),
  "subnormal": np.array([1e-40, -3e-42, 0.0, 1e-38] * 16 + [0.0], np.float32),
}
