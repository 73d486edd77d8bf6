"""Compiled programs of a host-resident model.

All stages (and models) with equal functions, codecs and shapes share one
compiled program. No program knows a level: encoding is one small program for
each codec, apart from the forward and backward passes. A change of level
therefore compiles nothing but encoding and decoding.

Random bits are addressed by `key_coordinates`, uint32[3]: seed, step and index
of the stage. Forward encoding folds 0 and gradient encoding folds 1 into that
key, then the position of the leaf, so that no two roundings share bits.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxmotion import core
from jaxmotion.codecs import Codec, identity
from jaxmotion.core import Array, PyTree, ShapedLike
from jaxmotion.memory._weights import _layout

_MIN_NORMAL = float(np.finfo(np.float32).tiny)


@dataclasses.dataclass(frozen=True)
class StageFunction:
  """A user's stage function under one signature; equal if the functions are."""

  fn: Callable[..., Any]
  takes_input: bool  # Whether `fn` takes x, the output of the stage before.
  is_stateful: bool  # Whether `fn` takes and returns stats.

  def __call__(
    self, params: PyTree, stats: PyTree, x: PyTree, batch: PyTree
  ) -> tuple[PyTree, PyTree]:
    """Returns the stage's output and its new stats."""
    args = (params,)
    args += (stats,) if self.is_stateful else ()
    args += (x,) if self.takes_input else ()
    out = self.fn(*args, batch)
    return out if self.is_stateful else (out, stats)


class ModelSpec(NamedTuple):
  """Options of a `HostResident` in the form that its step reads."""

  layout: _layout.Layout
  functions: tuple[StageFunction, ...]
  names: tuple[str, ...]  # Of the stages, for error messages.
  tx: optax.GradientTransformation
  level_codecs: tuple[Codec, ...]  # Of the weights at each level.
  levels: tuple[int, ...]  # Of each group.
  grad_codecs: tuple[Codec, ...]  # Of the gradient of each leaf.
  send_difference: bool  # Weights travel as differences to a reference.
  stream_weights: bool  # Weights are sent again for the backward pass.
  is_per_stage: bool  # Each stage is updated by itself.
  seed: int
  device_dtype: str
  host: jax.Device  # Of the CPU backend; holds weights and optimizer.
  device: jax.Device

  def packet_codec(
    self, packet: _layout.Packet, is_difference: bool
  ) -> tuple[Codec, tuple[jax.ShapeDtypeStruct, ...]]:
    """Returns the codec of a packet, and shape and dtype of what it encodes."""
    likes = packet.likes
    if packet.group is None:
      return identity(), likes
    if is_difference:
      likes = tuple(jax.ShapeDtypeStruct(a.shape, jnp.float32) for a in likes)
    return self.level_codecs[self.levels[packet.group]], likes


def encode(
  codec: Codec,
  dtype: str,
  leaves: Sequence[Array],
  reference: PyTree,
  key_coordinates: Any,
) -> list[PyTree]:
  """Encodes each leaf, or its difference to the reference."""
  # key_coordinates: uint32[3], seed, step and index of the stage.
  if codec == identity() and reference is None and dtype == "float32":
    # A jitted identity would copy: a pass over memory for the plain transfer.
    return [codec.encode(x)[0] for x in leaves]
  return _encode_leaves(codec, dtype, leaves, reference, key_coordinates)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _encode_leaves(
  codec: Codec,
  dtype: str,
  leaves: Sequence[Array],
  reference: PyTree,
  key_coordinates: Any,
) -> list[PyTree]:
  """Encodes leaves in a dtype, or their differences to the reference."""
  if reference is None:
    leaves = [x.astype(dtype) for x in leaves]
  else:
    differences = [x - r for x, r in zip(leaves, reference, strict=True)]
    # A reference that was not finite once would stay so for all later sums.
    leaves = [jnp.where(jnp.isfinite(d), d, 0.0) for d in differences]
  key = _stage_key(key_coordinates).fold(0)
  return [codec.encode(x, (), key.fold(i))[0] for i, x in enumerate(leaves)]


def decode(
  codec: Codec,
  likes: tuple[ShapedLike, ...],
  payloads: PyTree,
  reference: PyTree,
  donate: bool = False,
) -> list[Array]:
  """Decodes payloads by a jitted program, or none if they are the leaves."""
  # donate: whether the new reference may be written over the old one.
  if codec == identity() and reference is None:
    return [payload.values for payload in payloads]
  decode_leaves = _decode_in_place if donate else _decode_leaves
  return decode_leaves(codec, likes, payloads, reference)


def _decode_eagerly(
  codec: Codec,
  likes: tuple[ShapedLike, ...],
  payloads: PyTree,
  reference: PyTree,
) -> list[Array]:
  """Decodes the payloads, and adds them to the reference if there is one."""
  pairs = zip(payloads, likes, strict=True)
  leaves = [codec.decode(payload, like) for payload, like in pairs]
  if reference is None:
    return leaves
  return [_add_difference(r, d) for r, d in zip(reference, leaves, strict=True)]


_decode_leaves = jax.jit(_decode_eagerly, static_argnums=(0, 1))
_decode_in_place = jax.jit(
  _decode_eagerly, static_argnums=(0, 1), donate_argnums=3
)


@functools.partial(jax.jit, static_argnums=0)
def cast_leaves(dtype: str, leaves: Sequence[Array]) -> list[Array]:
  """Rounds the reference to the dtype that the stage computes in."""
  return [x.astype(dtype) for x in leaves]


def _add_difference(reference: Array, difference: Array) -> Array:
  """Returns the reference of the next step, the same on host and device."""
  # Host and device must hold the same bits, and some backends flush subnormal
  # results to zero: both sides flush them explicitly.
  total = _flush_subnormals(reference + _flush_subnormals(difference))
  # A sum that overflows would stay infinite forever: keep the reference.
  return jnp.where(jnp.isfinite(total), total, reference)


def _flush_subnormals(x: Array) -> Array:
  return jnp.where(jnp.abs(x) < _MIN_NORMAL, 0.0, x)


def _stage_key(key_coordinates: Any) -> core.Key:
  seed, step, stage_index = key_coordinates
  return core.make_key(seed).fold(step).fold(stage_index)


@functools.partial(
  jax.tree_util.register_dataclass,
  data_fields=["residuals"],
  meta_fields=["treedef", "input_indices"],
)
@dataclasses.dataclass(frozen=True)
class StageResiduals:
  """Residuals of a stage's backward pass besides the stage's inputs.

  The pullback of `jax.vjp` is a pytree that holds weights and inputs among its
  residuals. As results of a program they would be copied on the device. Inputs
  are therefore left out (found by the identity of their tracers), and
  `pullback` puts them back.
  """

  residuals: list[Array]
  treedef: Any  # Of the pullback.
  # For each array of the pullback its position among the stage's inputs, or
  # None if it is a residual.
  input_indices: tuple[int | None, ...]

  def pullback(self, *inputs: PyTree) -> Callable[[PyTree], PyTree]:
    """Returns the pullback, rebuilt from residuals and inputs."""
    input_leaves = jax.tree.leaves(inputs)
    residuals = iter(self.residuals)
    leaves = [
      next(residuals) if i is None else input_leaves[i]
      for i in self.input_indices
    ]
    return self.treedef.unflatten(leaves)


@functools.partial(jax.jit, static_argnums=0)
def forward(
  function: StageFunction, *inputs: PyTree
) -> tuple[PyTree, PyTree, StageResiduals]:
  """Runs a stage forward; returns its output, new stats and residuals."""
  # inputs: params, stats, x and batch.
  y, vjp, new_stats = _stage_vjp(function, *inputs)
  leaves, treedef = jax.tree.flatten(vjp)
  position = {id(a): i for i, a in enumerate(jax.tree.leaves(inputs))}
  input_indices = tuple(position.get(id(a)) for a in leaves)
  residuals = [a for a in leaves if id(a) not in position]
  return y, new_stats, StageResiduals(residuals, treedef, input_indices)


@functools.partial(jax.jit, static_argnums=0)
def forward_only(
  function: StageFunction, *inputs: PyTree
) -> tuple[PyTree, PyTree]:
  """Returns a stage's output and its new stats, without residuals."""
  return function(*inputs)


@functools.partial(jax.jit, static_argnums=(0, 1))
def recompute_backward(
  function: StageFunction,
  codecs: tuple[Codec, ...],
  inputs: tuple[PyTree, ...],
  ct: PyTree,
  states: PyTree,
  key_coordinates: Any,
) -> tuple[list[PyTree], PyTree, PyTree]:
  """Runs `backward` from the stage's inputs: recomputes the forward pass."""
  _, vjp, _ = _stage_vjp(function, *inputs)
  return _encode_gradients(codecs, vjp, ct, states, key_coordinates)


def _stage_vjp(
  function: StageFunction,
  params: PyTree,
  stats: PyTree,
  x: PyTree,
  batch: PyTree,
) -> tuple[PyTree, Any, PyTree]:
  """Returns a stage's output, its pullback to (params, x) and its new stats."""

  def run_stage(params: PyTree, x: PyTree) -> tuple[PyTree, PyTree]:
    # Flax refuses to change variables that were created outside of the function
    # that is differentiated: give it a tree of its own.
    own_stats = jax.tree.map(lambda a: a, stats)
    return function(params, own_stats, x, batch)

  return jax.vjp(run_stage, params, x, has_aux=True)


def _encode_gradients(
  codecs: tuple[Codec, ...],
  pullback: Callable[[PyTree], PyTree],
  ct: PyTree,
  states: PyTree,
  key_coordinates: Any,
) -> tuple[list[PyTree], PyTree, PyTree]:
  """Runs a stage's backward pass and encodes its gradients."""
  # key_coordinates: uint32[3], seed, step and index of the stage.
  # Returns the gradients' payloads, the cotangent of the stage's input and the
  # new codec states.
  grads, x_ct = pullback(ct)
  key = _stage_key(key_coordinates).fold(1)
  payloads, new_states = [], []
  for i, g in enumerate(jax.tree.leaves(grads)):
    payload, state = codecs[i].encode(g, states[i], key.fold(i))
    payloads.append(payload)
    decoded = codecs[i].decode(payload, core.shape_dtype(g))
    new_states.append(codecs[i].after_reduce(state, decoded))
  return payloads, x_ct, tuple(new_states)


backward = jax.jit(_encode_gradients, static_argnums=0)


@functools.partial(jax.jit, static_argnums=(0, 1, 2), donate_argnums=(3, 4))
def update(
  tx: optax.GradientTransformation,
  codecs: tuple[Codec, ...],
  dtype: str,
  params: PyTree,
  opt_state: PyTree,
  payloads: Sequence[PyTree],
) -> tuple[PyTree, PyTree]:
  """Decodes gradients; returns the updated parameters and optimizer state."""
  leaves = jax.tree.leaves(params)
  grads = [
    codec.decode(payload, jax.ShapeDtypeStruct(x.shape, dtype)).astype(x.dtype)
    for codec, payload, x in zip(codecs, payloads, leaves, strict=True)
  ]
  tree = jax.tree.unflatten(jax.tree.structure(params), grads)
  updates, opt_state = tx.update(tree, opt_state, params)
  return optax.apply_updates(params, updates), opt_state


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def squared_error(
  codec: Codec,
  dtype: str,
  likes: tuple[ShapedLike, ...],
  leaves: Sequence[Array],
  reference: PyTree,
  key_coordinates: Any,
) -> Array:
  """Returns the squared error of the weights that the device would get."""
  # key_coordinates: uint32[3], seed, step and index of the stage.
  payloads = _encode_leaves(codec, dtype, leaves, reference, key_coordinates)
  received = _decode_eagerly(codec, likes, payloads, reference)
  received = [x.astype(dtype).astype(jnp.float32) for x in received]
  pairs = zip(leaves, received, strict=True)
  return sum((jnp.sum(jnp.square(x - y)) for x, y in pairs), jnp.float32(0))
