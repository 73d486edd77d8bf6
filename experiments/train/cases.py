"""Exchanges that a configuration can name: codecs, or whole algorithms."""

import jax
import optax

import jaxmotion
from experiments.common import names
from experiments.train import presets
from experiments.train.presets import Place, Settings
from jaxmotion import codecs
from jaxmotion.core import AxisName

# Biases and norms are less than 1 % of the parameters. They stay uncompressed,
# and the byte ratios of the rows count them.
_SMALL_LEAVES = r"bias|scale"


def _compress_kernels(codec: codecs.Codec) -> codecs.Codec:
  return codecs.rules(((_SMALL_LEAVES, codecs.identity()), (r".*", codec)))


KERNEL_CODECS = {
  "int8": codecs.uniform(bits=8),
  "int4_feedback": codecs.feedback(codecs.uniform(bits=4)),
  "topk1_feedback": codecs.feedback(codecs.topk(density=0.01)),
  "sign_feedback": codecs.feedback(codecs.sign()),
}
"""Codec of all but small leaves, by name of the exchange."""

EXCHANGES = {
  "fp32": codecs.identity(),
  "bf16": codecs.cast("bfloat16"),
} | {name: _compress_kernels(codec) for name, codec in KERNEL_CODECS.items()}
"""Codec by name of the exchange; fp32 is the baseline of the others."""


_ROTATED_INT4 = codecs.chain(
  codecs.rotate(block=32),
  codecs.uniform(bits=4, block=128, rounding="stochastic"),
)

_INT4_DIFFERENCES = codecs.uniform(bits=4, block=2048)

SHARDED: dict[str, tuple[codecs.Codec | None, codecs.Codec | None]] = {
  "sharded_fp32": (None, None),
  "sharded_int8": (
    _compress_kernels(codecs.uniform(bits=8)),
    _compress_kernels(codecs.uniform(bits=8)),
  ),
  "sharded_int8_int4": (
    _compress_kernels(codecs.uniform(bits=8)),
    _compress_kernels(_INT4_DIFFERENCES),
  ),
  "sharded_int4": (
    _compress_kernels(_ROTATED_INT4),
    _compress_kernels(_INT4_DIFFERENCES),
  ),
}
"""Codecs of gradients and of weights' differences, by name of the exchange."""


DELAYED = "delayed_"
"""Prefix of an exchange whose mean the next step applies."""


def undelayed_name(name: str) -> str:
  """Returns the name of an exchange without the prefix of a delayed one."""
  return name.removeprefix(DELAYED)


def settled_branches(name: str) -> tuple[int | None, ...]:
  """Returns the branches that steps take in turn, after a preset's start.

  >>> settled_branches("power_sgd_alternating")
  (0, 1)
  """
  name = undelayed_name(name)
  if name == presets.ALTERNATING:
    return (0, 1)
  # What a preset starts with is the later of two branches.
  return (0,) if name in presets.PRESETS else (None,)


def check_exchange(name: str) -> None:
  """Raises unless there is an exchange of this name, whatever its kind."""
  name = undelayed_name(name)
  names.check_name(
    name, (*EXCHANGES, *SHARDED, *presets.PRESETS), "`config.exchanges`"
  )


def get_exchange(name: str) -> codecs.Codec:
  """Returns the codec of an exchange."""
  names.check_name(name, EXCHANGES, "`config.exchanges`")
  return EXCHANGES[name]


def find_axes(mesh: jax.sharding.Mesh) -> AxisName:
  """Returns the workers' axis, or those of hosts and of their devices."""
  outer, *inner = mesh.axis_names
  return jaxmotion.HostAxes(outer, tuple(inner)) if inner else outer


def exchange_with(
  mesh: jax.sharding.Mesh,
  exchange: str,
  optimizer: optax.GradientTransformation,
  settings: Settings = Settings(),  # noqa: B008, a tuple of numbers.
) -> optax.GradientTransformation:
  """Returns an optimizer with its exchange; of two axes, within hosts first."""
  axes = find_axes(mesh)
  if exchange.startswith(DELAYED):
    name = undelayed_name(exchange)
    return jaxmotion.delayed(
      exchange_with(mesh, name, optimizer, settings), axis_name=axes
    )
  if exchange in presets.PRESETS:
    place = Place(axes, optimizer, settings)
    return presets.PRESETS[exchange](place)
  if exchange in SHARDED:
    gradients, weights = SHARDED[exchange]
    return jaxmotion.sharded(
      axes, optimizer, gradient_codec=gradients, weight_codec=weights
    )
  codec = get_exchange(exchange)
  return optax.chain(jaxmotion.exchange(axes, codec), optimizer)
