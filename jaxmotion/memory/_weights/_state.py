"""State of a host-resident model between two steps."""

import dataclasses
from typing import Any, ClassVar

import jax
import numpy as np

from jaxmotion.core import PyTree
from jaxmotion.memory import _check_separate
from jaxmotion.memory._weights import _programs


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


def init_optimizer(
  spec: _programs.ModelSpec, params: PyTree
) -> tuple[PyTree, ...]:
  """Returns the optimizer states, one for each stage or one for all."""
  init = jax.jit(spec.tx.init)
  if not spec.is_per_stage:
    return (init(params),)
  leaves = jax.tree.leaves(params)
  stages = [
    stage.treedef.unflatten([leaves[i] for i in stage.model_indices])
    for stage in spec.layout.stages
  ]
  for stage_params in stages:
    _check_separate.check_separate(spec.tx, stage_params, "stage")
  return tuple(map(init, stages))


def place_reference(state: HostState, device: jax.Device) -> PyTree:
  """Copies the weights that the host sent last to the device, for one step."""
  # A step donates them, so that no other array may share their buffers. A step
  # that failed leaves the host's arrays in their place, which have the same
  # bits and must be copied.
  own = {id(a) for a in own_reference(state)}

  def place_leaf(a: Any) -> Any:
    is_own = id(a) in own and isinstance(a, jax.Array)
    return jax.device_put(a if is_own else np.array(a), device)

  return jax.tree.map(place_leaf, state.device_reference)


def own_reference(state: HostState) -> list[Any]:
  """Returns the weights on the device that are not the host's own arrays."""
  of_host = {id(a) for a in jax.tree.leaves(state.reference)}
  return [
    a for a in jax.tree.leaves(state.device_reference) if id(a) not in of_host
  ]


def init_reference(spec: _programs.ModelSpec) -> PyTree:
  """Returns zeros for every leaf that travels as a difference."""
  if not spec.send_difference:
    return ()
  return tuple(
    tuple(
      None
      if packet.group is None
      else [np.zeros(a.shape, np.float32) for a in packet.likes]
      for packet in stage.packets
    )
    for stage in spec.layout.stages
  )


def init_grad_state(spec: _programs.ModelSpec) -> tuple[PyTree, ...]:
  """Returns the gradient codec's state of each stage, one for every leaf."""
  return tuple(
    tuple(
      spec.grad_codecs[i].init(like)
      for i, like in zip(stage.model_indices, stage.likes, strict=True)
    )
    for stage in spec.layout.stages
  )
