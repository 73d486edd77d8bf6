"""State of a host-resident model between two steps."""

import dataclasses
from typing import Any, ClassVar

import jax
import numpy as np
import optax

from jaxmotion.codecs import Codec
from jaxmotion.core import PyTree
from jaxmotion.memory import _check_separate
from jaxmotion.memory.weights import _layout


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class HostState:
  """State of a host-resident model between two steps; a pytree to checkpoint.

  A state is whole at any time, so that it can be saved after any exception. A
  step leaves its argument as it was until all gradients are on the host. Then
  it writes what it returns into the argument as well. If an exception discards
  the result, the donated buffers have no other holder.

  Attributes:
    step: int32[] of NumPy, number of steps taken.
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
    sent_bytes: int64[] of NumPy, bytes of all payloads sent to the device so
      far.
    returned_bytes: int64[] of NumPy, bytes of all payloads sent back so far.

  Example:
    >>> import optax
    >>> from jaxmotion import memory
    >>> model = memory.HostResident(
    ...   lambda w, x: jnp.mean((x @ w) ** 2), optax.sgd(0.1)
    ... )
    >>> state = model.init(jnp.ones((4, 2)))
    >>> int(state.step), state.params.shape, int(state.sent_bytes)
    (0, (4, 2), 0)
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
  # Whether a step has taken the state: the next one refuses it.
  is_taken: ClassVar[bool] = False


def take_over(state: HostState, new: HostState) -> None:
  """Writes the state that a step made of another into that one."""
  # One call of C, which no signal handler can interrupt.
  vars(state).update(vars(new), is_taken=True)


def init_optimizer(
  tx: optax.GradientTransformation,
  layout: _layout.Layout,
  params: PyTree,
  is_per_stage: bool,
) -> tuple[PyTree, ...]:
  """Returns the optimizer states, one for each stage or one for all."""
  init = jax.jit(tx.init)
  if not is_per_stage:
    return (init(params),)
  leaves = jax.tree.leaves(params)
  parts = [
    stage.treedef.unflatten([leaves[i] for i in stage.model_indices])
    for stage in layout.stages
  ]
  for part in parts:
    _check_separate.check_separate(tx, part, "stage")
  return tuple(init(part) for part in parts)


def place_reference(
  reference: PyTree, device_reference: PyTree, device: jax.Device
) -> PyTree:
  """Returns the weights on the device, in buffers of their own."""
  # A step donates them. A step that failed leaves the host's arrays in their
  # place, which have the same bits.
  kept = {id(a) for a in jax.tree.leaves(reference)}

  def place_leaf(a: Any) -> Any:
    is_shared = id(a) in kept or not isinstance(a, jax.Array)
    return jax.device_put(np.array(a) if is_shared else a, device)

  return jax.tree.map(place_leaf, device_reference)


def own_reference(state: HostState) -> list[Any]:
  """Returns the weights on the device that are not the host's own arrays."""
  kept = {id(a) for a in jax.tree.leaves(state.reference)}
  return [
    a for a in jax.tree.leaves(state.device_reference) if id(a) not in kept
  ]


def init_reference(layout: _layout.Layout) -> PyTree:
  """Returns zeros for every leaf that travels as a difference."""

  def packet_zeros(
    stage: _layout.StageLayout, packet: _layout.Packet
  ) -> PyTree:
    if packet.group is None:
      return None
    return [
      np.zeros(stage.likes[i].shape, np.float32) for i in packet.stage_indices
    ]

  return tuple(
    tuple(packet_zeros(stage, packet) for packet in stage.packets)
    for stage in layout.stages
  )


def init_grad_state(
  layout: _layout.Layout, codecs: tuple[Codec, ...]
) -> PyTree:
  """Returns the gradient codec's state of each stage, one for every leaf."""
  return tuple(
    tuple(
      codecs[i].init(like)
      for i, like in zip(stage.model_indices, stage.likes, strict=True)
    )
    for stage in layout.stages
  )
