"""Exchanges that a configuration can name: one codec each."""

from jaxmotion import codecs

# Biases and norms are less than 1 % of the parameters. They stay uncompressed,
# and the byte ratios of the rows count them.
_SMALL_LEAVES = r"bias|scale"


def _compress_kernels(codec: codecs.Codec) -> codecs.Codec:
  return codecs.rules(((_SMALL_LEAVES, codecs.identity()), (r".*", codec)))


EXCHANGES = {
  "fp32": codecs.identity(),
  "bf16": codecs.cast("bfloat16"),
  "int8": _compress_kernels(codecs.uniform(bits=8)),
  "int4_feedback": _compress_kernels(codecs.feedback(codecs.uniform(bits=4))),
  "topk1_feedback": _compress_kernels(
    codecs.feedback(codecs.topk(density=0.01))
  ),
  "sign_feedback": _compress_kernels(codecs.feedback(codecs.sign())),
}
"""Codec by name of the exchange; fp32 is the baseline of the others."""


_ROTATED_INT4 = codecs.chain(
  codecs.rotate(block=32),
  codecs.uniform(bits=4, block=128, rounding="stochastic"),
)

SHARDED: dict[str, tuple[codecs.Codec | None, codecs.Codec | None]] = {
  "sharded_fp32": (None, None),
  "sharded_int8": (
    _compress_kernels(codecs.uniform(bits=8)),
    _compress_kernels(codecs.uniform(bits=8)),
  ),
  "sharded_int4": (
    _compress_kernels(_ROTATED_INT4),
    _compress_kernels(codecs.uniform(bits=4, block=2048)),
  ),
}
"""Codecs of gradients and of weights' differences, by name of the exchange."""


def check_exchange(name: str) -> None:
  """Raises unless there is an exchange of this name, sharded or not.

  Args:
    name: what a configuration names.

  Raises:
    ValueError: there is no such exchange.
  """
  if name not in SHARDED:
    get_exchange(name)


def get_exchange(name: str) -> codecs.Codec:
  """Returns the codec of an exchange.

  Args:
    name: one of `EXCHANGES`.

  Raises:
    ValueError: there is no such exchange.
  """
  if name not in EXCHANGES:
    raise ValueError(
      "`config.exchanges` must name some of"
      f" {', '.join((*EXCHANGES, *SHARDED))}, got {name!r}."
    )
  return EXCHANGES[name]
