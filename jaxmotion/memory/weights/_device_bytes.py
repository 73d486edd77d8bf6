"""What the device holds at most while a host-resident model trains."""

import functools
from collections.abc import Callable, Hashable
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxmotion.codecs import Codec, identity
from jaxmotion.core import PyTree, tree_bytes
from jaxmotion.memory.weights import _programs as programs
from jaxmotion.memory.weights._layout import Layout, StageLayout
from jaxmotion.memory.weights._programs import Body

TempBytes = Callable[..., int]


def temp_bytes(fn: Callable[..., PyTree], *args: PyTree) -> int:
  """What a program takes besides arguments and results, compiled for JAX's
  backend."""
  memory: Any = jax.jit(fn).lower(*args).compile().memory_analysis()
  return int(memory.temp_size_in_bytes)


class _Stage(NamedTuple):
  """Bytes of one stage.

  Attributes:
    x: of its input; 0 of the first.
    kept: what it holds from its forward pass to its backward pass, but x.
    forward: what its forward pass makes, weights and all.
    backward: what its backward pass makes.
    grads: of the gradients' payloads, which are part of `backward`.
    ct: of its output's cotangent.
  """

  x: int
  kept: int
  forward: int
  backward: int
  grads: int
  ct: int


class Request(NamedTuple):
  """A step of which only shapes are known.

  Attributes:
    model: a `HostResident`.
    layout: of its parameters.
    codecs: of the gradients of each leaf.
    levels: of each group.
    grad_state: of the gradients' codec, by stage.
    stats: by stage.
    batch: what functions take.
  """

  model: Any
  layout: Layout
  codecs: tuple[Codec, ...]
  levels: tuple[int, ...]
  grad_state: tuple[PyTree, ...]
  stats: tuple[PyTree, ...]
  batch: PyTree


def device_bytes(request: Request, compiled: TempBytes) -> int:
  """Returns the most bytes on the device, as by the order of `_step.Step`.

  Two programs may be under way at a time: the next is dispatched while the one
  before it runs. What they take is added up.
  """
  model, layout = request.model, request.layout
  stages = _stages(request, compiled)
  base = tree_bytes((request.batch, request.stats, request.grad_state))
  if model.send_difference:
    base += sum(_held_bytes(stage) for stage in layout.stages)
  count = len(stages)
  most = 0
  for k, stage in enumerate(stages):
    before = sum(s.kept for s in stages[:k])
    inputs = sum(s.x for s in stages[: k + 1])
    following = stages[k + 1].forward if k + 1 < count else stage.backward
    most = max(most, before + inputs + stage.forward + following)
    returning = (
      0 if model.stream_weights else sum(s.grads for s in stages[k + 1 :])
    )
    own = stage.kept + stage.ct + stage.backward
    following = stages[k - 1].backward if k else 0
    most = max(most, before + inputs + returning + own + following)
  return base + most


def _stages(request: Request, compiled: TempBytes) -> list[_Stage]:
  """Walks through the stages, each distinct program compiled once."""
  known: dict[Hashable, int] = {}

  def temp(fn: Callable[..., Any], static: tuple, *args: PyTree) -> int:
    leaves, treedef = jax.tree.flatten(args)
    shapes = tuple((a.shape, str(a.dtype)) for a in leaves)
    key = (fn, static, treedef, shapes)
    if key not in known:
      known[key] = compiled(functools.partial(fn, *static), *args)
    return known[key]

  found, x = [], None
  for k, body in enumerate(request.model.bodies):
    stage, x = _stage(request, k, body, x, temp)
    found.append(stage)
  return found


def _stage(
  request: Request, k: int, body: Body, x: PyTree, temp: TempBytes
) -> tuple[_Stage, PyTree]:
  model, layout = request.model, request.layout.stages[k]
  weights = layout.treedef.unflatten(layout.likes)
  given = (weights, request.stats[k], x, request.batch)
  static: tuple[Any, ...] = (tuple(request.codecs[i] for i in layout.leaves),)
  arrive, own = _arriving(request, layout, temp)
  state = (request.grad_state[k], np.zeros(3, np.uint32))
  if model.stream_weights:
    forward, backward = programs.forward_only, programs.recompute_backward
    y, _ = jax.eval_shape(functools.partial(forward, body), *given)
    kept, again = 0, arrive + own
    made, static, needed = own, (body, *static), given
  else:
    forward, backward = programs.forward, programs.backward
    y, _, saved = jax.eval_shape(functools.partial(forward, body), *given)
    made = kept = own + tree_bytes(saved)
    again, needed = 0, saved.pullback(*given)
  grads, x_ct, _ = jax.eval_shape(
    functools.partial(backward, *static), needed, y, *state
  )
  return _Stage(
    x=tree_bytes(x),
    kept=kept,
    forward=arrive + made + tree_bytes(y) + temp(forward, (body,), *given),
    backward=again
    + tree_bytes((grads, x_ct))
    + temp(backward, static, needed, y, *state),
    grads=tree_bytes(grads),
    ct=tree_bytes(y),
  ), y


def _arriving(
  request: Request, stage: StageLayout, temp: TempBytes
) -> tuple[int, int]:
  """Returns the bytes of a stage's payloads and of unpacking them, and those
  of the weights that they become."""
  model = request.model
  arrive = own = 0
  for packet in stage.packets:
    codec, likes = stage.packed(packet, model.ladder, request.levels)
    payloads = [codec.payload_like(a) for a in likes]
    held = (
      list(likes)
      if model.send_difference and packet.group is not None
      else None
    )
    if held or codec != identity():  # Else they are the weights.
      arrive += tree_bytes(payloads)
      arrive += temp(programs.decode, (codec, likes), payloads, held)
    own += 0 if held else tree_bytes(likes)
  return arrive, own


def _held_bytes(stage: StageLayout) -> int:
  packed = [p.leaves for p in stage.packets if p.group is not None]
  return tree_bytes([stage.likes[i] for leaves in packed for i in leaves])
