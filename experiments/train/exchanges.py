"""The exchanges a configuration can name: one codec each."""

from jaxmotion import codecs

# Biases and norms are a fraction of a per cent of the parameters: they travel
# as they are, and the ratios below count them.
_SMALL = r"bias|scale"


def _kernels(codec: codecs.Codec) -> codecs.Codec:
  return codecs.rules(((_SMALL, codecs.identity()), (r".*", codec)))


EXCHANGES = {
  "fp32": codecs.identity(),
  "bf16": codecs.cast("bfloat16"),
  "int8": _kernels(codecs.uniform(bits=8)),
  "int4_feedback": _kernels(codecs.feedback(codecs.uniform(bits=4))),
  "topk1_feedback": _kernels(codecs.feedback(codecs.topk(density=0.01))),
  "sign_feedback": _kernels(codecs.feedback(codecs.sign())),
}
"""Codec by case name; fp32 is what the others are compared with."""


def get_exchange(name: str) -> codecs.Codec:
  """The codec of a case name.

  Raises:
    ValueError: if there is no such case.
  """
  if name not in EXCHANGES:
    raise ValueError(
      f"`config.exchanges` must name some of {', '.join(EXCHANGES)}, got"
      f" {name!r}."
    )
  return EXCHANGES[name]
