"""Modes of training: ways to choose what the backward pass keeps."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import optax
from jax.ad_checkpoint import checkpoint_name

from experiments import models
from jaxmotion import codecs, core, memory
from jaxmotion.core import Array, PyTree

INT8 = codecs.uniform(bits=8, block=64, rounding="stochastic")
INT4 = codecs.uniform(bits=4, block=64, rounding="stochastic")

_PRODUCTS = ("dot_general", "conv_general_dilated")
_INPUT = "input"


class StepProgram(NamedTuple):
  """A training step as a function and the shapes of its arguments."""

  # Function of the parameters and more; returns the loss and gradients, or new
  # parameters.
  fn: Callable[..., PyTree]
  args: tuple[PyTree, ...]  # Shapes of the arguments.
  # Positions of arguments that results may overwrite.
  donated: tuple[int, ...] = ()


def build_step(mode: str, net: models.Network, batch: int) -> StepProgram:
  """Builds the training step of a mode."""
  core.choice(tuple(MODES))("mode", mode)
  return MODES[mode](net, batch)


def _make_gradient_mode(
  make_wrap: Callable[[models.Network], models.Wrap | None], together: int = 1
) -> Callable[..., StepProgram]:
  """Returns a mode whose step returns the loss and all gradients."""

  def build(net: models.Network, batch: int) -> StepProgram:
    wrap = make_wrap(net)
    fn = jax.value_and_grad(lambda p, b: net.loss(p, b, wrap, together))
    return StepProgram(fn, (net.params, net.batch(batch)))

  return build


def _make_checkpoint_mode(
  policy: Any = None, name: str | None = None
) -> Callable[..., StepProgram]:
  """Returns a mode of `jax.checkpoint` around each block."""

  def wrap_block(block: models.Block, _: str) -> models.Block:
    def run_block(params: PyTree, x: Array) -> Array:
      return block(params, checkpoint_name(x, name) if name else x)

    return jax.checkpoint(run_block, policy=policy)

  return _make_gradient_mode(lambda _: wrap_block)


def _make_residual_mode(
  codec: Any = None, together: int = 1, **options: Any
) -> Callable[..., StepProgram]:
  """Returns a mode of `memory.compress_residuals` around groups of blocks."""

  def make_wrap(net: models.Network) -> models.Wrap:
    first = net.stages[0].name

    def wrap_block(block: models.Block, name: str) -> models.Block:
      # The batch stays in memory anyway: the first block need not save it.
      params = (0, 1) if name == first else 0
      return memory.compress_residuals(block, codec, params=params, **options)

    return wrap_block

  return _make_gradient_mode(make_wrap, together)


def _make_update_mode(
  codec: Any = None, **options: Any
) -> Callable[..., StepProgram]:
  """Returns a mode of `memory.OptimizerInBackward` with gradient descent."""

  def build(net: models.Network, batch: int) -> StepProgram:
    blocks = [(stage.block, stage.repeats) for stage in net.stages]
    model = memory.OptimizerInBackward(
      blocks, models.cross_entropy, optax.sgd(0.1), codec=codec, **options
    )
    params = [net.params[stage.name] for stage in net.stages]
    state = jax.eval_shape(model.init, params)
    return StepProgram(model.step, (params, state, *net.batch(batch)), (0, 1))

  return build


_OFFLOAD_INPUT = jax.checkpoint_policies.save_and_offload_only_these_names(
  names_which_can_be_saved=[],
  names_which_can_be_offloaded=[_INPUT],
  offload_src="device",
  offload_dst="pinned_host",
)

_GRADIENT_MODES = {
  "plain": _make_gradient_mode(lambda _: None),
  "jax_checkpoint": _make_checkpoint_mode(),
  "jax_checkpoint_products": _make_checkpoint_mode(
    lambda prim, *_, **__: prim.name in _PRODUCTS
  ),
  "jax_checkpoint_no_batch": _make_checkpoint_mode(
    jax.checkpoint_policies.dots_with_no_batch_dims_saveable
  ),
  "jax_offload": _make_checkpoint_mode(_OFFLOAD_INPUT, _INPUT),
  "cut": _make_residual_mode(),
  "cut_half": _make_residual_mode(memory_budget=0.5),
  "cut_least": _make_residual_mode(memory_budget=0.0),
  "cut_int8": _make_residual_mode(INT8),
  "cut_int4": _make_residual_mode(INT4),
  "cut_together": _make_residual_mode(together=7),
  "cut_int4_together": _make_residual_mode(INT4, together=7),
  "cut_host": _make_residual_mode(memory.offload()),
  "cut_int8_host": _make_residual_mode(memory.offload(INT8)),
  "again_int8": _make_residual_mode(INT8, memory_budget=0.0),
  "again_int8_host": _make_residual_mode(
    memory.offload(INT8), memory_budget=0.0
  ),
}
GRADIENT_MODES = tuple(_GRADIENT_MODES)
"""Names of the modes that return gradients."""

MODES: dict[str, Callable[[models.Network, int], StepProgram]] = {
  **_GRADIENT_MODES,
  "update": _make_update_mode(),
  "update_int4_host": _make_update_mode(memory.offload(INT4)),
  "everything": _make_update_mode(memory.offload(INT8), segment=1),
}
"""Function that builds a training step from a network and a batch, by mode.

plain: `jax.value_and_grad`. jax_checkpoint: `jax.checkpoint` of each block;
jax_checkpoint_products: the same, saving matmuls and convolutions; jax_offload:
the same, with the inputs of blocks in host memory. The other modes are those of
`jaxmotion.memory`. cut: saves a minimum cut of each block, exactly or in 8 or 4
bits, on the device or in host memory; cut_together: one cut for up to seven
blocks. again: saves the inputs of blocks and recomputes the rest. update:
updates the parameters in the backward pass. everything: update with the inputs
of blocks in host memory in 8 bits. 8 and 4 bits round stochastically.
"""
