"""Preset `sdp4bit`: 4 bits in both directions of a sharded optimizer."""

import optax

from jaxmotion import codecs, core, transforms
from jaxmotion.core import AxisName


def sdp4bit(
  axis_name: AxisName,
  tx: optax.GradientTransformation | optax.MultiSteps,
  *,
  nonfinite: str = "propagate",
  seed: int = 0,
) -> optax.GradientTransformationExtraArgs:
  """Makes `sharded` with 4-bit gradients and 4-bit differences of weights.

  Gradients travel within a host in 8 bits, blocks of 512, and between hosts
  rotated in blocks of 32, in 4 bits, blocks of 128. The weights' part of each
  worker travels as the difference to what all workers hold, in 4 bits, blocks
  of 2048. Without `HostAxes` gradients take the second step alone.

  Ours differs from the reference thus. Gradients are rounded stochastically
  before they leave a host, so their mean is unbiased without error memory. The
  rotation has random signs. Leaves are encoded one by one, not as one buffer;
  those of fewer than 64 elements per worker are averaged in 4 bits. Levels are
  symmetric and have no room beyond the maximum of a block.

  Args:
    axis_name: the workers' axis, or `HostAxes`.
    tx: optimizer that treats every element by itself, as for `sharded`.
    nonfinite: "propagate", "skip" or "zero", as for `sharded`.
    seed: seed of stochastic rounding, in [0, 2^32).

  Returns:
    A transformation that takes the place of `optax.chain(exchange(...), tx)`.

  Raises:
    TypeError, ValueError: as `sharded`.

  Example:
    >>> import optax
    >>> tx = sdp4bit("data", optax.adamw(3e-4))
    >>> mesh = jax.sharding.Mesh(jax.devices()[:1], ("data",))
    >>> from jaxmotion import make_train_step
    >>> init, step = make_train_step(lambda w, x: jnp.mean(x @ w), tx, mesh)
    >>> state = init(jnp.ones((16, 8)))
    >>> state, loss = step(state, jnp.ones((4, 16)))
    >>> float(loss)
    16.0

  References:
    Jia et al., *SDP4Bit: Toward 4-bit Communication Quantization in Sharded
    Data Parallelism for LLM Training*, arXiv 2410.15526, 2024. Code:
    jindajia/SDP4Bit, commit ed75187.
  """
  within = codecs.uniform(bits=8, block=512, rounding="stochastic")
  between = codecs.chain(
    codecs.rotate(block=32),
    codecs.uniform(bits=4, block=128, rounding="stochastic"),
  )
  return transforms.sharded(
    axis_name,
    tx,
    gradient_codec=between,
    weight_codec=codecs.uniform(bits=4, block=2048),
    nonfinite=nonfinite,
    seed=seed,
    local_codec=within if isinstance(axis_name, core.HostAxes) else None,
  )
