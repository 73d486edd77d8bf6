"""Names of the codecs that experiments calibrate."""

from jaxmotion import codecs

CODECS = {
  "bf16": codecs.cast("bfloat16"),
  "int8": codecs.uniform(bits=8),
  "int4": codecs.uniform(bits=4),
  "sign": codecs.sign(),
  "topk1": codecs.topk(density=0.01),
  "int4_feedback": codecs.feedback(codecs.uniform(bits=4)),
  "sign_feedback": codecs.feedback(codecs.sign()),
  "topk1_feedback": codecs.feedback(codecs.topk(density=0.01)),
}
