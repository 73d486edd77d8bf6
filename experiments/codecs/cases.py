"""Codecs that are timed, and which of them each measurement covers."""

from jaxmotion import codecs

CODECS = {
  "bf16": codecs.cast("bfloat16"),
  "fp8_e4m3": codecs.cast("float8_e4m3fn"),
  "fp8_e5m2": codecs.cast("float8_e5m2"),
  "truncate1": codecs.truncate(bytes=1),
  "truncate2": codecs.truncate(bytes=2),
  "truncate3": codecs.truncate(bytes=3),
  "int8": codecs.uniform(bits=8),
  "int8_stochastic": codecs.uniform(bits=8, rounding="stochastic"),
  "int8_minmax": codecs.uniform(bits=8, symmetric=False),
  "int4": codecs.uniform(bits=4),
  "int4_stochastic": codecs.uniform(bits=4, rounding="stochastic"),
  "int2": codecs.uniform(bits=2),
  "sign": codecs.sign(),
  "topk1": codecs.topk(density=0.01),
  "topk1_int8": codecs.chain(codecs.topk(density=0.01), codecs.uniform(bits=8)),
  "int8_feedback": codecs.feedback(codecs.uniform(bits=8)),
  "int4_feedback": codecs.feedback(codecs.uniform(bits=4)),
  "sign_feedback": codecs.feedback(codecs.sign()),
  "topk1_feedback": codecs.feedback(codecs.topk(density=0.01)),
}
"""Codec by name; all of them are timed at encoding a matrix."""

UPDATES = ("bf16", "int8", "int4", "sign", "topk1")
"""Codecs timed inside an SGD update."""

TREES = ("bf16", "int8", "int4", "sign", "topk1")
"""Codecs timed at encoding trees of many leaves."""
