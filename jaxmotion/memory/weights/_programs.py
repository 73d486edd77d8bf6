"""The compiled programs of a host-resident model.

They are shared by all stages (and models) with equal functions, codecs and
shapes, and none of them knows a level: packing is one small program for each
codec, apart from the forward and backward passes.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxmotion.codecs import Codec, identity
from jaxmotion.core import Array, Key, PyTree, ShapedLike, make_key, shape_dtype

_LEAST = float(np.finfo(np.float32).tiny)


@dataclasses.dataclass(frozen=True)
class Body:
  """A stage's function under one signature; equal if the functions are.

  Attributes:
    fn: the user's.
    staged: whether it takes x.
    stateful: whether it takes and returns stats.
  """

  fn: Callable[..., Any]
  staged: bool
  stateful: bool

  def __call__(
    self, params: PyTree, stats: PyTree, x: PyTree, batch: PyTree
  ) -> tuple[PyTree, PyTree]:
    """Returns the stage's x and stats."""
    args = (params,)
    args += (stats,) if self.stateful else ()
    args += (x,) if self.staged else ()
    out = self.fn(*args, batch)
    return out if self.stateful else (out, stats)


def encode(
  codec: Codec, leaves: Sequence[Array], held: PyTree, where: Any
) -> list[PyTree]:
  """Returns a payload for each leaf, or for its difference to `reference`."""
  if codec == identity() and held is None:
    # A copy would cost the plain transfer a pass over memory.
    return [codec.encode(x)[0] for x in leaves]
  return _encode(codec, leaves, held, where)


@functools.partial(jax.jit, static_argnums=0)
def _encode(
  codec: Codec, leaves: Sequence[Array], held: PyTree, where: Any
) -> list[PyTree]:
  if held is not None:
    leaves = [_finite(x - h) for x, h in zip(leaves, held, strict=True)]
  key = _key(where).fold(0)
  return [codec.encode(x, (), key.fold(i))[0] for i, x in enumerate(leaves)]


def decode(
  codec: Codec, likes: tuple[ShapedLike, ...], payloads: PyTree, held: PyTree
) -> list[Array]:
  """Returns the leaves of the payloads, or `reference` with these added to it.

  The buffers of `reference` are donated.
  """
  if codec == identity() and held is None:
    return [payload.values for payload in payloads]
  return _decode(codec, likes, payloads, held)


@functools.partial(jax.jit, static_argnums=(0, 1), donate_argnums=3)
def _decode(
  codec: Codec, likes: tuple[ShapedLike, ...], payloads: PyTree, held: PyTree
) -> list[Array]:
  pairs = zip(payloads, likes, strict=True)
  leaves = [codec.decode(p, a) for p, a in pairs]
  if held is None:
    return leaves
  return [_add(h, d) for h, d in zip(held, leaves, strict=True)]


def _finite(x: Array) -> Array:
  return jnp.where(jnp.isfinite(x), x, 0.0)


def _add(held: Array, delta: Array) -> Array:
  # Host and device must agree, and not every backend has subnormal numbers.
  total = _flush(held + _flush(delta))
  return jnp.where(jnp.isfinite(total), total, held)


def _flush(x: Array) -> Array:
  return jnp.where(jnp.abs(x) < _LEAST, 0.0, x)


def _key(where: Any) -> Key:
  seed, step, stage = where
  return make_key(seed).fold(step).fold(stage)


@dataclasses.dataclass(frozen=True)
class _Recipe:
  """How a stage's pullback is put together from residuals and inputs."""

  treedef: Any
  # For each of its arrays the position among the inputs, or None.
  source: tuple[int | None, ...]


@functools.partial(
  jax.tree_util.register_dataclass,
  data_fields=["residuals"],
  meta_fields=["recipe"],
)
@dataclasses.dataclass(frozen=True)
class Saved:
  """What a stage's backward pass needs besides the stage's inputs.

  Weights are among the inputs: as residuals they would be copied.
  """

  residuals: list[Array]
  recipe: _Recipe

  def pullback(self, *inputs: PyTree) -> Callable[[PyTree], PyTree]:
    """Returns the pullback; `inputs` are what `forward` was given."""
    given = jax.tree.leaves(inputs)
    rest = iter(self.residuals)
    leaves = [next(rest) if i is None else given[i] for i in self.recipe.source]
    return jax.tree.unflatten(self.recipe.treedef, leaves)


@functools.partial(jax.jit, static_argnums=0)
def forward(
  body: Body, params: PyTree, stats: PyTree, x: PyTree, batch: PyTree
) -> tuple[PyTree, PyTree, Saved]:
  """Returns a stage's x and stats, and what its backward pass needs."""
  y, vjp, new = _vjp(body, params, stats, x, batch)
  leaves, treedef = jax.tree.flatten(vjp)
  inputs = jax.tree.leaves((params, stats, x, batch))
  position = {id(a): i for i, a in enumerate(inputs)}
  source = tuple(position.get(id(a)) for a in leaves)
  own = [a for a, i in zip(leaves, source, strict=True) if i is None]
  return y, new, Saved(own, _Recipe(treedef, source))


@functools.partial(jax.jit, static_argnums=0)
def forward_only(
  body: Body, params: PyTree, stats: PyTree, x: PyTree, batch: PyTree
) -> tuple[PyTree, PyTree]:
  """Returns a stage's x and stats."""
  return body(params, stats, x, batch)


@functools.partial(jax.jit, static_argnums=0, donate_argnums=3)
def backward(
  codecs: tuple[Codec, ...],
  pullback: Callable[[PyTree], PyTree],
  ct: PyTree,
  states: PyTree,
  where: Any,
) -> tuple[list[PyTree], PyTree, PyTree]:
  """Returns the gradients' payloads, x's cotangent and the codecs' states."""
  return _pull(codecs, pullback, ct, states, where)


@functools.partial(jax.jit, static_argnums=(0, 1), donate_argnums=4)
def recompute_backward(
  body: Body,
  codecs: tuple[Codec, ...],
  inputs: tuple[PyTree, ...],
  ct: PyTree,
  states: PyTree,
  where: Any,
) -> tuple[list[PyTree], PyTree, PyTree]:
  """`backward` from the stage's inputs alone."""
  _, vjp, _ = _vjp(body, *inputs)
  return _pull(codecs, vjp, ct, states, where)


def _vjp(
  body: Body, params: PyTree, stats: PyTree, x: PyTree, batch: PyTree
) -> tuple[PyTree, Any, PyTree]:
  def run(params: PyTree, x: PyTree) -> tuple[PyTree, PyTree]:
    # Made anew: Flax refuses to change variables that were made outside.
    own = jax.tree.map(lambda a: a, stats)
    return body(params, own, x, batch)

  return jax.vjp(run, params, x, has_aux=True)


def _pull(
  codecs: tuple[Codec, ...],
  pullback: Callable[[PyTree], PyTree],
  ct: PyTree,
  states: PyTree,
  where: Any,
) -> tuple[list[PyTree], PyTree, PyTree]:
  grads, x_ct = pullback(ct)
  key = _key(where).fold(1)
  payloads, new = [], []
  for i, g in enumerate(jax.tree.leaves(grads)):
    payload, state = codecs[i].encode(g, states[i], key.fold(i))
    payloads.append(payload)
    new.append(
      codecs[i].after_reduce(state, codecs[i].decode(payload, shape_dtype(g)))
    )
  return payloads, x_ct, tuple(new)


@functools.partial(jax.jit, static_argnums=(0, 1), donate_argnums=(2, 3))
def update(
  tx: optax.GradientTransformation,
  codecs: tuple[Codec, ...],
  params: PyTree,
  opt_state: PyTree,
  payloads: Sequence[PyTree],
) -> tuple[PyTree, PyTree]:
  """Returns the parameters and the optimiser's state after one step."""
  leaves = jax.tree.leaves(params)
  grads = [
    codec.decode(payload, shape_dtype(x))
    for codec, payload, x in zip(codecs, payloads, leaves, strict=True)
  ]
  tree = jax.tree.unflatten(jax.tree.structure(params), grads)
  updates, opt_state = tx.update(tree, opt_state, params)
  return optax.apply_updates(params, updates), opt_state


@functools.partial(jax.jit, static_argnums=(0, 1))
def squared_error(
  codec: Codec,
  likes: tuple[ShapedLike, ...],
  leaves: Sequence[Array],
  held: PyTree,
  where: Any,
) -> Array:
  """Returns the squared error of what the device would compute with."""
  payloads = _encode(codec, leaves, held, where)
  there = _decode(codec, likes, payloads, held)
  pairs = zip(leaves, there, strict=True)
  return sum((jnp.sum(jnp.square(x - y)) for x, y in pairs), jnp.float32(0))
