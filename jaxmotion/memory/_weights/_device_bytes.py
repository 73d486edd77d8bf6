"""Peak device memory of a host-resident model's step, from shapes."""

import functools
from collections.abc import Callable, Hashable
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxmotion import core
from jaxmotion.codecs import identity
from jaxmotion.core import PyTree
from jaxmotion.memory._weights import _layout, _programs

MeasureMemory = Callable[..., int]


def measure_temp_bytes(fn: Callable[..., PyTree], *args: PyTree) -> int:
  """Returns the temporary bytes of a program, compiled for JAX's backend."""
  memory: Any = jax.jit(fn).lower(*args).compile().memory_analysis()
  return int(memory.temp_size_in_bytes)


class StepShapes(NamedTuple):
  """Shapes of everything that a step reads."""

  spec: _programs.ModelSpec
  grad_state: tuple[PyTree, ...]  # Of the gradients' codec, by stage.
  stats: tuple[PyTree, ...]  # Of each stage.
  batch: PyTree  # What the stage functions take as batch.


class _StageBytes(NamedTuple):
  """Bytes of one stage on the device."""

  input: int  # The stage's input x; 0 for the first stage.
  saved: int  # Arrays held for the backward pass, without x.
  forward: int  # Arrays that the forward pass creates, with decoded weights.
  backward: int  # Arrays that the backward pass creates.
  gradients: int  # Payloads of the gradients, part of `backward`.
  # New states of the gradients' codec, part of `backward`; the old ones stay
  # until the step is done.
  states: int
  cotangent: int  # Of the stage's output.


def peak_device_bytes(shapes: StepShapes, measure_memory: MeasureMemory) -> int:
  """Returns the most bytes on the device at any time of a step."""
  # `Step` dispatches a program while the one before it still runs. So the bytes
  # of every two programs that follow each other are added up. While stage `s`
  # computes, the device holds
  # - forward: the inputs and saved arrays of all stages before it;
  # - backward: those too, and the new states of the gradients' codec. The
  #   gradients of all later stages may still be on their way to the host,
  #   unless `stream_weights` waits for gradients one stage behind.
  # This is an upper bound: the tests hold it above the live arrays of a step,
  # and within 1.5 times of them.
  spec = shapes.spec
  meter, x = _StageMeter(shapes, measure_memory), None
  stages = []
  for stage_index, function in enumerate(spec.functions):
    stage, x = meter.measure_stage(stage_index, function, x)
    stages.append(stage)
  always_live = core.tree_bytes((shapes.batch, shapes.stats, shapes.grad_state))
  if spec.send_difference:
    # The reference is float32, whatever dtype the device computes in.
    always_live += 4 * sum(
      like.size
      for stage in spec.layout.stages
      for packet in stage.packets
      for like in packet.likes
      if packet.group is not None
    )
  peak = 0
  for s, stage in enumerate(stages):
    saved = sum(earlier.saved for earlier in stages[:s])
    inputs = sum(earlier.input for earlier in stages[: s + 1])
    later = stages[s + 1 :]
    next_program = later[0].forward if later else stage.backward
    peak = max(peak, saved + inputs + stage.forward + next_program)
    returning = sum(one.states for one in later)
    if not spec.stream_weights:
      returning += sum(one.gradients for one in later)
    own = stage.saved + stage.cotangent + stage.backward
    next_program = stages[s - 1].backward if s else 0
    peak = max(peak, saved + inputs + returning + own + next_program)
  return always_live + peak


class _StageMeter:
  """Measures stages from shapes; compiles each distinct program once."""

  def __init__(self, shapes: StepShapes, measure_memory: MeasureMemory):
    self._shapes, self._measure_memory = shapes, measure_memory
    self._known: dict[Hashable, int] = {}

  def _program_bytes(
    self, fn: Callable[..., Any], static: tuple[Any, ...], *args: PyTree
  ) -> int:
    """Returns the temporary bytes of a program, from `_known` if possible."""
    leaves, treedef = jax.tree.flatten(args)
    avals = tuple((a.shape, str(a.dtype)) for a in leaves)
    key = (fn, static, treedef, avals)
    if key not in self._known:
      program = functools.partial(fn, *static)
      self._known[key] = self._measure_memory(program, *args)
    return self._known[key]

  def measure_stage(
    self, stage_index: int, function: _programs.StageFunction, x: PyTree
  ) -> tuple[_StageBytes, PyTree]:
    """Returns the bytes of a stage and the shape of its output."""
    # Weights decoded for the forward pass stay as inputs of the backward pass.
    # They are received again if weights are streamed. `saved` and
    # `received_again` hold either.
    shapes, spec = self._shapes, self._shapes.spec
    layout = spec.layout.stages[stage_index]
    weights = layout.treedef.unflatten(layout.likes)
    inputs = (weights, shapes.stats[stage_index], x, shapes.batch)
    codecs = tuple(spec.grad_codecs[i] for i in layout.model_indices)
    received, weight_bytes = self._received_bytes(layout)
    state = (shapes.grad_state[stage_index], np.zeros(3, np.uint32))
    if spec.stream_weights:
      forward, backward = _programs.forward_only, _programs.recompute_backward
      y, _ = forward.eval_shape(function, *inputs)
      created, saved = weight_bytes, 0
      received_again = received + weight_bytes
      static: tuple[Any, ...] = (function, codecs)
      first_argument: Any = inputs
    else:
      forward, backward = _programs.forward, _programs.backward
      y, _, residuals = forward.eval_shape(function, *inputs)
      created = saved = weight_bytes + core.tree_bytes(residuals)
      received_again = 0
      static = (codecs,)
      first_argument = residuals.pullback(*inputs)
    args = (first_argument, y, *state)
    grads, x_ct, states = backward.eval_shape(*static, *args)
    return _StageBytes(
      input=core.tree_bytes(x),
      saved=saved,
      forward=received
      + created
      + core.tree_bytes(y)
      + self._program_bytes(forward, (function,), *inputs),
      backward=received_again
      + core.tree_bytes((grads, x_ct, states))
      + self._program_bytes(backward, static, *args),
      gradients=core.tree_bytes(grads),
      states=core.tree_bytes(states),
      cotangent=core.tree_bytes(y),
    ), y

  def _received_bytes(self, stage: _layout.StageLayout) -> tuple[int, int]:
    """Returns the bytes of receiving a stage's weights, and of the weights."""
    # Receiving takes the payloads and the temporary bytes of decoding them.
    # With a reference, decoding updates it in place. It creates weights only if
    # the device computes with another dtype than the reference has.
    spec = self._shapes.spec
    received = weight_bytes = 0
    for packet in stage.packets:
      has_reference = spec.send_difference and packet.group is not None
      codec, likes = spec.packet_codec(packet, has_reference)
      payloads = [codec.payload_like(a) for a in likes]
      reference = list(likes) if has_reference else None
      if reference or codec != identity():
        received += core.tree_bytes(payloads)
        received += self._program_bytes(
          _programs.decode, (codec, likes), payloads, reference
        )
      # Payloads of `identity` without a reference are the weights themselves.
      if not reference or spec.device_dtype != "float32":
        weight_bytes += core.tree_bytes(packet.likes)
    return received, weight_bytes
