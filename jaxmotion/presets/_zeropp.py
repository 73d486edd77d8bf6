"""Preset `zeropp`: ZeRO++, low bits and few gathers for sharded parameters."""

import dataclasses
import functools
from typing import Any

import optax

from jaxmotion import codecs, transforms
from jaxmotion.presets import _shared

_SET = ("weight_codec", "gradient_codec", "local_codec", "regather")


def zeropp(
  tx: optax.GradientTransformation | optax.MultiSteps,
  **options: Any,
) -> transforms.Scheme:
  """Makes the scheme `fully_sharded` with 8-bit weights and 4-bit gradients.

  Weights are gathered in 8 bits, blocks of 2048 (qwZ): between hosts once a
  step, within a host once more in the backward pass (hpZ). Gradients are
  averaged in 4 bits, blocks of 128, within a host and then between hosts (qgZ).
  `make_train_step` tells the scheme the hosts, as `HostAxes`. Without them
  weights are gathered twice over all workers.

  Ours differs from the reference thus. Gradients are divided by all workers.
  The reference divides those of matrices by the hosts alone, so they are larger
  than those of vectors by the devices of a host. Levels are symmetric, so a
  positive maximum is kept; the reference cuts it to 7/8. Vectors are encoded as
  matrices are. Leaves of fewer than 64 elements per worker are averaged in
  float32.

  Args:
    tx: optimizer that treats every element by itself.
    **options: other arguments of `fully_sharded`, such as `stacked`.

  Returns:
    A scheme for `make_train_step`, as from `fully_sharded`.

  Raises:
    TypeError: an option that the preset sets.
    TypeError, ValueError: as `fully_sharded`.

  Example:
    >>> import optax
    >>> from jaxmotion import HostAxes
    >>> from jaxmotion.transforms import gather_block
    >>> mesh = jax.sharding.Mesh([jax.devices()[:1]], ("host", "device"))
    >>> block = gather_block(lambda w, x: jnp.tanh(x @ w))
    >>> init, step = transforms.make_train_step(
    ...   lambda w, x: jnp.mean(block(w, x) ** 2),
    ...   zeropp(optax.adam(1e-3)),
    ...   mesh,
    ...   axis_name=HostAxes("host", "device"),
    ... )
    >>> state, loss = step(init(jnp.ones((8, 8))), jnp.zeros((4, 8)))
    >>> float(loss)
    0.0

  References:
    Wang et al., *ZeRO++: Extremely Efficient Collective Communication for Giant
    Model Training*, arXiv 2306.10209, 2023. Code: deepspeedai/DeepSpeed, commit
    edaa722, runtime/comm/coalesced_collectives.py.
  """
  _shared.refuse_options("zeropp", "fully_sharded", _SET, options)
  int4 = codecs.uniform(bits=4, block=128)
  make = functools.partial(
    transforms.fully_sharded,
    tx,
    weight_codec=codecs.uniform(bits=8, block=2048),
    gradient_codec=int4,
    **options,
  )
  return _Zeropp(make(local_codec=int4, regather="local"), make())


@dataclasses.dataclass(frozen=True)
class _Zeropp(transforms.Scheme):
  """Scheme that is another one with hosts than without."""

  with_hosts: transforms.Scheme
  without_hosts: transforms.Scheme

  def for_workers(self, workers: transforms.Workers) -> transforms.Scheme:
    """Returns the scheme for these workers."""
    has_hosts = workers.host_axes is not None
    return self.with_hosts if has_hosts else self.without_hosts
