"""Ways to train a network, by what they keep for the backward pass."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import optax
from jax.ad_checkpoint import checkpoint_name

from experiments.models import Block, Network, Wrap, cross_entropy
from jaxmotion import codecs, memory
from jaxmotion.core import Array, PyTree, check_choice

INT8 = codecs.uniform(bits=8, block=64, rounding="stochastic")
INT4 = codecs.uniform(bits=4, block=64, rounding="stochastic")

_PRODUCTS = ("dot_general", "conv_general_dilated")
_INPUT = "input"


class Job(NamedTuple):
  """A step of training.

  Attributes:
    fn: parameters first; the loss and the gradients, or new parameters.
    args: shapes of what it takes.
    donated: positions of arguments that results may overwrite.
  """

  fn: Callable[..., PyTree]
  args: tuple[PyTree, ...]
  donated: tuple[int, ...] = ()


def job(mode: str, net: Network, batch: int) -> Job:
  """Makes the step of a mode.

  Args:
    mode: of `MODES`.
    net: what is trained.
    batch: examples.

  Raises:
    ValueError: there is no such mode.
  """
  check_choice("mode", mode, tuple(MODES))
  return MODES[mode](net, batch)


def _gradients(
  wrap: Callable[[Network], Wrap | None], together: int = 1
) -> Callable[..., Job]:
  """Modes that return the loss and all gradients."""

  def make(net: Network, batch: int) -> Job:
    own = wrap(net)
    fn = jax.value_and_grad(lambda p, b: net.loss(p, b, own, together))
    return Job(fn, (net.params, net.batch(batch)))

  return make


def _checkpoint(
  policy: Any = None, name: str | None = None
) -> Callable[..., Job]:
  """Modes of JAX's own."""

  def wrap(block: Block, _: str) -> Block:
    def named(params: PyTree, x: Array) -> Array:
      return block(params, checkpoint_name(x, name) if name else x)

    return jax.checkpoint(named, policy=policy)

  return _gradients(lambda _: wrap)


def _ours(
  codec: Any = None, together: int = 1, **options: Any
) -> Callable[..., Job]:
  """Modes of `memory.compress_residuals`, around some blocks at a time."""

  def wrap(net: Network) -> Wrap:
    first = net.stages[0].name

    def around(block: Block, name: str) -> Block:
      # The batch is there anyway.
      free = (0, 1) if name == first else 0
      return memory.compress_residuals(block, codec, params=free, **options)

    return around

  return _gradients(wrap, together)


def _updates(codec: Any = None, **options: Any) -> Callable[..., Job]:
  """Modes of `memory.OptimizerInBackward`, by gradient descent."""

  def make(net: Network, batch: int) -> Job:
    blocks = [(stage.block, stage.repeats) for stage in net.stages]
    model = memory.OptimizerInBackward(
      blocks, cross_entropy, optax.sgd(0.1), codec=codec, **options
    )
    params = [net.params[stage.name] for stage in net.stages]
    state = jax.eval_shape(model.init, params)
    return Job(model.step, (params, state, *net.batch(batch)), (0, 1))

  return make


def _is_product(prim: Any, *_: Any, **params: Any) -> bool:
  return prim.name in _PRODUCTS


_OFFLOAD_INPUT = jax.checkpoint_policies.save_and_offload_only_these_names(
  names_which_can_be_saved=[],
  names_which_can_be_offloaded=[_INPUT],
  offload_src="device",
  offload_dst="pinned_host",
)

MODES: dict[str, Callable[[Network, int], Job]] = {
  "plain": _gradients(lambda _: None),
  "jax_checkpoint": _checkpoint(),
  "jax_checkpoint_products": _checkpoint(_is_product),
  "jax_offload": _checkpoint(_OFFLOAD_INPUT, _INPUT),
  "cut": _ours(),
  "cut_int8": _ours(INT8),
  "cut_int4": _ours(INT4),
  "cut_together": _ours(together=7),
  "cut_int4_together": _ours(INT4, together=7),
  "cut_host": _ours(memory.offload()),
  "cut_int8_host": _ours(memory.offload(INT8)),
  "again_int8": _ours(INT8, recompute="all"),
  "again_int8_host": _ours(memory.offload(INT8), recompute="all"),
  "update": _updates(),
  "update_int4_host": _updates(memory.offload(INT4)),
  "everything": _updates(memory.offload(INT8), segment=1),
}
"""Steps by name, made of a network and a size of its batch.

plain: `jax.value_and_grad`. jax_checkpoint: `jax.checkpoint` of each block;
_products: that keeps products and convolutions; jax_offload: that puts the
inputs of blocks on the host. Ours: cut keeps what is dear to compute, exactly
or in 8 or 4 bits, on the device or the host, of each block or of up to seven
together; again keeps the inputs of blocks and computes the rest again; update
changes parameters in the backward pass; everything is all of it at once. Eight
and four bits round stochastically.
"""
