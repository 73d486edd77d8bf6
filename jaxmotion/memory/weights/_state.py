"""State of a host-resident model between two steps."""

from typing import Any, NamedTuple

import jax
import numpy as np
import optax

from jaxmotion.codecs import Codec
from jaxmotion.core import PyTree
from jaxmotion.memory.weights._layout import Layout, Packet, StageLayout


class HostState(NamedTuple):
  """State of a host-resident model between two steps; a pytree to checkpoint.

  Attributes:
    step: int32[], number of steps taken.
    params: float32 master weights, on the host.
    opt_state: tuple of optimizer states, on the host: one for each stage with
      `update="per_stage"`, otherwise one for all.
    reference: with `send_difference`, the host's copy of the weights on the
      device; otherwise `()`.
    device_reference: with `send_difference`, the weights on the device, equal
      to `reference` bit for bit; otherwise `()`.
    grad_state: state of the gradients' codec for every leaf, on the device.
    stats: tuple of one tree per stage, on the device: what stages update
      without gradients.
    sent_bytes: int64[], bytes of all payloads sent to the device so far.
    returned_bytes: int64[], bytes of all payloads sent back so far.
  """

  step: Any
  params: PyTree
  opt_state: PyTree
  reference: PyTree
  device_reference: PyTree
  grad_state: PyTree
  stats: PyTree
  sent_bytes: Any
  returned_bytes: Any


def init_optimizer(
  tx: optax.GradientTransformation,
  layout: Layout,
  params: PyTree,
  is_per_stage: bool,
) -> tuple[PyTree, ...]:
  """Returns the optimizer states, one for each stage or one for all.

  Args:
    tx: optax transformation.
    layout: layout of the parameters.
    params: parameters of the whole model.
    is_per_stage: whether each stage is updated by itself.
  """
  init = jax.jit(tx.init)
  if not is_per_stage:
    return (init(params),)
  leaves = jax.tree.leaves(params)
  return tuple(
    init(stage.treedef.unflatten([leaves[i] for i in stage.model_indices]))
    for stage in layout.stages
  )


def init_reference(layout: Layout) -> PyTree:
  """Returns zeros for every leaf that travels as a difference."""

  def packet_zeros(stage: StageLayout, packet: Packet) -> PyTree:
    if packet.group is None:
      return None
    return [
      np.zeros(stage.likes[i].shape, np.float32) for i in packet.stage_indices
    ]

  return tuple(
    tuple(packet_zeros(stage, packet) for packet in stage.packets)
    for stage in layout.stages
  )


def init_grad_state(layout: Layout, codecs: tuple[Codec, ...]) -> PyTree:
  """Returns the gradient codec's state of each stage, one for every leaf.

  Args:
    layout: layout of the parameters.
    codecs: codec of the gradient of each leaf of the model.
  """
  return tuple(
    tuple(
      codecs[i].init(like)
      for i, like in zip(stage.model_indices, stage.likes, strict=True)
    )
    for stage in layout.stages
  )
