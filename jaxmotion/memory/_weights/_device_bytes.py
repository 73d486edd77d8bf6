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
  stages = _measure_stages(shapes, measure_memory)
  always_live = core.tree_bytes((shapes.batch, shapes.stats, shapes.grad_state))
  if spec.send_difference:
    always_live += sum(_reference_bytes(stage) for stage in spec.layout.stages)
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


def _measure_stages(
  shapes: StepShapes, measure_memory: MeasureMemory
) -> list[_StageBytes]:
  """Returns the bytes of every stage; compiles each distinct program once."""
  known: dict[Hashable, int] = {}

  def program_bytes(
    fn: Callable[..., Any], static: tuple[Any, ...], *args: PyTree
  ) -> int:
    """Returns the temporary bytes of a program, from `known` if possible."""
    leaves, treedef = jax.tree.flatten(args)
    avals = tuple((a.shape, str(a.dtype)) for a in leaves)
    key = (fn, static, treedef, avals)
    if key not in known:
      known[key] = measure_memory(functools.partial(fn, *static), *args)
    return known[key]

  stages, x = [], None
  for stage_index, function in enumerate(shapes.spec.functions):
    stage, x = _measure_stage(shapes, stage_index, function, x, program_bytes)
    stages.append(stage)
  return stages


def _measure_stage(
  shapes: StepShapes,
  stage_index: int,
  function: _programs.StageFunction,
  x: PyTree,
  program_bytes: MeasureMemory,
) -> tuple[_StageBytes, PyTree]:
  """Returns the bytes of a stage and the shape of its output."""
  # Weights decoded for the forward pass stay as inputs of the backward pass.
  # They are received again if weights are streamed. `saved` and
  # `received_again` hold either.
  spec, layout = shapes.spec, shapes.spec.layout.stages[stage_index]
  weights = layout.treedef.unflatten(layout.likes)
  inputs = (weights, shapes.stats[stage_index], x, shapes.batch)
  codecs = tuple(spec.grad_codecs[i] for i in layout.model_indices)
  received, weight_bytes = _received_bytes(shapes, layout, program_bytes)
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
  grads, x_ct, states = backward.eval_shape(*static, first_argument, y, *state)
  return _StageBytes(
    input=core.tree_bytes(x),
    saved=saved,
    forward=received
    + created
    + core.tree_bytes(y)
    + program_bytes(forward, (function,), *inputs),
    backward=received_again
    + core.tree_bytes((grads, x_ct, states))
    + program_bytes(backward, static, first_argument, y, *state),
    gradients=core.tree_bytes(grads),
    states=core.tree_bytes(states),
    cotangent=core.tree_bytes(y),
  ), y


def _received_bytes(
  shapes: StepShapes, stage: _layout.StageLayout, program_bytes: MeasureMemory
) -> tuple[int, int]:
  """Returns the bytes of receiving a stage's weights, and of the weights."""
  # Receiving takes the payloads and the temporary bytes of decoding them. With
  # a reference, decoding updates it in place. It creates weights only if the
  # device computes with another dtype than the reference has.
  spec = shapes.spec
  received = weight_bytes = 0
  for packet in stage.packets:
    has_reference = spec.send_difference and packet.group is not None
    codec, likes = spec.packet_codec(stage, packet, has_reference)
    payloads = [codec.payload_like(a) for a in likes]
    reference = list(likes) if has_reference else None
    if reference or codec != identity():
      received += core.tree_bytes(payloads)
      received += program_bytes(
        _programs.decode, (codec, likes), payloads, reference
      )
    # Payloads of `identity` without a reference are the weights themselves.
    if not reference or spec.device_dtype != "float32":
      weight_bytes += core.tree_bytes(
        [stage.likes[i] for i in packet.stage_indices]
      )
  return received, weight_bytes


def _reference_bytes(stage: _layout.StageLayout) -> int:
  encoded = [p.stage_indices for p in stage.packets if p.group is not None]
  sizes = [stage.likes[i].size for indices in encoded for i in indices]
  return 4 * sum(sizes)
