"""Every codec: a new codec is a new row."""

import numpy as np

from jaxmotion import codecs

CODECS = {
  "identity": codecs.identity(),
  "bf16": codecs.cast("bfloat16"),
  "f16": codecs.cast("float16"),
  "e4m3": codecs.cast("float8_e4m3fn"),
  "e5m2": codecs.cast("float8_e5m2"),
  "truncate1": codecs.truncate(bytes=1),
  "truncate2": codecs.truncate(bytes=2),
  "truncate3": codecs.truncate(bytes=3),
  "truncate4": codecs.truncate(bytes=4),
  "truncate2_nearest": codecs.truncate(bytes=2, rounding="nearest"),
  "int8": codecs.uniform(bits=8),
  "int8_stochastic": codecs.uniform(bits=8, rounding="stochastic"),
  "int8_minmax": codecs.uniform(bits=8, symmetric=False, block=64),
  "int7": codecs.uniform(bits=7, block=33),
  "int6": codecs.uniform(bits=6),
  "int5_minmax": codecs.uniform(bits=5, symmetric=False),
  "int4": codecs.uniform(bits=4, block=64),
  "int4_stochastic": codecs.uniform(bits=4, rounding="stochastic"),
  "int3": codecs.uniform(bits=3),
  "int2": codecs.uniform(bits=2, block=16),
  "int1": codecs.uniform(bits=1),
  "int1_minmax": codecs.uniform(bits=1, symmetric=False),
  "sign": codecs.sign(block=64),
  "topk": codecs.topk(density=0.1),
  "topk_block": codecs.topk(density=0.1, block=40),
  "topk_many": codecs.topk(density=0.5, block=64),
  "topk_int8": codecs.chain(codecs.topk(density=0.1), codecs.uniform(bits=8)),
  "ternary": codecs.ternary(block=64),
  "ternary_threshold": codecs.ternary(block=64, rounding="threshold"),
  "mxfp8_e4m3": codecs.microscaling(format="float8_e4m3fn"),
  "mxfp8_e5m2": codecs.microscaling(format="float8_e5m2"),
  "mxfp6_e3m2": codecs.microscaling(format="float6_e3m2fn"),
  "mxfp6_e2m3": codecs.microscaling(format="float6_e2m3fn"),
  "mxfp4": codecs.microscaling(format="float4_e2m1fn"),
  "nonnegative": codecs.nonnegative(block=64),
  "nonnegative16": codecs.nonnegative(block=64, bits=16),
  "random_k": codecs.random_k(density=0.3),
  "random_k_plain": codecs.random_k(density=0.3, scaled=False),
  "threshold": codecs.threshold(value=1.0, capacity=0.5),
  "zero_value": codecs.zero_value(capacity=1.0),
  "zero_value_half": codecs.zero_value(capacity=0.5, tile=64),
  "rotate": codecs.rotate(block=32),
  "rotate_int4": codecs.chain(codecs.rotate(block=64), codecs.uniform(bits=4)),
  "random_k_int8": codecs.chain(
    codecs.random_k(density=0.3), codecs.uniform(bits=8)
  ),
  "int4_feedback": codecs.feedback(codecs.uniform(bits=4)),
  "topk_feedback": codecs.feedback(codecs.topk(density=0.1), decay=0.9),
}


_COLUMNS = codecs.topk_columns(count=3)
# Codecs of algorithms, whose laws tests of their own hold. Their payloads are
# frozen as well.
ALGORITHMS = {
  "tiles": codecs.tiles(chunk=16),
  "tiles_row": codecs.tiles(chunk=16, fit="divide", shape="row"),
  "dct": codecs.dct(chunk=8),
  "dct_topk": codecs.chain(codecs.dct(chunk=16), _COLUMNS),
  "topk_columns": _COLUMNS,
  "codebook2": codecs.codebook(bits=2),
  "codebook8": codecs.codebook(bits=8),
  "sparse_loco": codecs.chain(
    codecs.tiles(chunk=16),
    codecs.contributors(codecs.chain(_COLUMNS, codecs.codebook(bits=2))),
  ),
  "lloyd_max2": codecs.lloyd_max(bits=2, block=64),
  "lloyd_max4": codecs.lloyd_max(bits=4, block=64),
  "mxfp4_e3m0": codecs.microscaling(format="float4_e3m0"),
  "onebit": codecs.onebit(),
  "vote": codecs.vote(),
  "dgc": codecs.momentum_correction(codecs.feedback(codecs.topk(density=0.1))),
  "ef21": codecs.ef21(codecs.topk(density=0.1)),
  "low_rank": codecs.low_rank(rank=2),
}


# Rows that run the code of another row, with another width, format or density.
# Laws and frozen payloads hold them. Suites that compile programs for
# every codec take the other rows.
VARIANTS = """
  f16 e5m2 truncate2 truncate3 truncate4 int8_stochastic int8_minmax int7 int6
  int3 int2 int1_minmax topk_many mxfp8_e5m2 mxfp6_e2m3 mxfp4 random_k_plain
  zero_value rotate random_k_int8
  """.split()
KINDS = [name for name in CODECS if name not in VARIANTS]


# These add values up, which no two programs do in the same order.
ULPS = {"sign": 8, "ternary_threshold": 8, "rotate": 16, "rotate_int4": 16}
ULPS |= dict.fromkeys(("dct", "dct_topk", "codebook2", "codebook8"), 16)
ULPS |= dict.fromkeys(("sparse_loco", "lloyd_max2", "lloyd_max4"), 16)
ULPS |= {"onebit": 16, "low_rank": 64}


ARRAYS = {
  "scalar": np.float32(1.5),
  "empty": np.zeros((0,), np.float32),
  "odd": np.random.default_rng(0).normal(size=(37, 29)).astype(np.float32),
  "half": np.array([65504, -65488, 1, 6e-8, -0.0] * 5, np.float16),
}
