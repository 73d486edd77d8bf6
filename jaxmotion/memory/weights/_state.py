"""What a host-resident model remembers between two steps."""

from typing import Any, NamedTuple

import jax
import numpy as np
import optax

from jaxmotion.codecs import Codec
from jaxmotion.core import PyTree
from jaxmotion.memory.weights._layout import Layout, Packet, StageLayout


class HostState(NamedTuple):
  """A host-resident model between two steps: a pytree to checkpoint.

  Attributes:
    step: int32[], steps taken.
    params: float32 master weights, on the host.
    opt_state: the optimiser's states, on the host: one for each stage with
      `update="per_stage"`, or one.
    reference: with `send_difference`, the host's copy of the weights that the device holds;
      otherwise `()`.
    device_reference: with `send_difference`, those weights, on the device, equal to `reference`
      bit for bit; otherwise `()`.
    grad_state: of the gradients' codec, for every leaf, on the device.
    stats: what stages update without gradients, on the device; a tuple of one
      for each stage.
    sent_bytes: int64[], of all payloads that went to the device so far.
    returned_bytes: int64[], of all that came back.
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


def init_tx(
  tx: optax.GradientTransformation, layout: Layout, params: PyTree, update: str
) -> tuple[PyTree, ...]:
  """Returns the optimiser's states, one for each stage if so updated."""
  init = jax.jit(tx.init)
  if update == "once":
    return (init(params),)
  leaves = jax.tree.leaves(params)
  return tuple(
    init(stage.treedef.unflatten([leaves[i] for i in stage.leaves]))
    for stage in layout.stages
  )


def init_held(layout: Layout) -> PyTree:
  """Returns zeros for every leaf that travels as a difference."""

  def of_packet(stage: StageLayout, packet: Packet) -> PyTree:
    if packet.group is None:
      return None
    return [np.zeros(stage.likes[i].shape, np.float32) for i in packet.leaves]

  return tuple(
    tuple(of_packet(stage, packet) for packet in stage.packets)
    for stage in layout.stages
  )


def init_grads(layout: Layout, codecs: tuple[Codec, ...]) -> PyTree:
  """Returns each stage's codec states, one for every leaf."""
  return tuple(
    tuple(
      codecs[i].init(like)
      for i, like in zip(stage.leaves, stage.likes, strict=True)
    )
    for stage in layout.stages
  )
