"""A network as a chain of stages, some of which repeat a block."""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

from experiments.models.layers import Layer, after
from jaxmotion.core import Array, PyTree, ShapedLike

Block = Callable[[PyTree, Array], Array]
Wrap = Callable[[Block, str], Block]


class Stage(NamedTuple):
  """A block, run once or several times.

  Attributes:
    name: what its parameters are found by.
    block: `block(params, x) -> x`, hashable.
    repeats: how often it runs, each time with parameters of its own. Where
      that is more than once, they are stacked along a leading axis, and the
      output has the shape of the input.
  """

  name: str
  block: Layer
  repeats: int = 1


@dataclasses.dataclass(frozen=True)
class Network:
  """A network without state: each stage reads what the one before has made.

  Args:
    name: what it is called.
    stages: from inputs to logits.
    input: shape and dtype of one example.
    label: shape and dtype of one example's labels.
  """

  name: str
  stages: tuple[Stage, ...]
  input: jax.ShapeDtypeStruct
  label: jax.ShapeDtypeStruct

  def init(self, key: Array) -> PyTree:
    """Float32 parameters, a tree for each stage by its name."""
    keys = jax.random.split(key, len(self.stages))
    return {
      stage.name: _draw(stage.repeats, specs, own)
      for stage, specs, own in zip(
        self.stages, self._specs(), keys, strict=True
      )
    }

  @property
  def params(self) -> PyTree:
    """The shapes of the parameters."""
    return jax.eval_shape(self.init, jax.random.key(0))

  @property
  def size(self) -> int:
    """Number of parameters."""
    return sum(math.prod(a.shape) for a in jax.tree.leaves(self.params))

  def batch(self, size: int) -> tuple[ShapedLike, ShapedLike]:
    """The shapes of so many examples and their labels."""
    one = self.input, self.label
    inputs, labels = (
      jax.ShapeDtypeStruct((size, *a.shape), a.dtype) for a in one
    )
    return inputs, labels

  def apply(
    self,
    params: PyTree,
    x: Array,
    wrap: Wrap | None = None,
    together: int = 1,
  ) -> Array:
    """Logits.

    Args:
      params: from `init`.
      x: a batch of inputs.
      wrap: `wrap(block, stage name)` makes what runs in a block's place. A
        stage that repeats its block is one `lax.scan` of it.
      together: repeats that are one block to `wrap`, at most: as many as
        divide a stage's.
    """
    for name, block, repeats in self.stages:
      size = max(n for n in range(1, together + 1) if repeats % n == 0)
      run: Block = block if size == 1 else functools.partial(_chain, block)
      run = wrap(run, name) if wrap else run
      own = params[name]
      if size > 1:
        own = jax.tree.map(lambda a, n=size: _cut(a, n), own)
      x = repeat(run, own, x) if repeats > size else run(own, x)
    return x

  def loss(
    self,
    params: PyTree,
    batch: tuple[Array, Array],
    wrap: Wrap | None = None,
    together: int = 1,
  ) -> Array:
    """The mean cross-entropy.

    Args:
      params: from `init`.
      batch: inputs and labels, as `batch` says.
      wrap: as for `apply`.
      together: as for `apply`.
    """
    inputs, labels = batch
    logits = self.apply(params, inputs, wrap, together)
    return cross_entropy(logits, labels)

  def activations(self, params: PyTree, x: Array) -> dict[str, Array]:
    """What comes out of every ReLU and every pooling over windows.

    Args:
      params: from `init`.
      x: a batch of inputs.

    Returns:
      By "stage/layer", or "stage/i/layer" of the i-th repeat, in the order of
      the forward pass.
    """
    seen: dict[str, Array] = {}

    def see(place: str, layer: str, y: Array) -> None:
      seen[f"{place}/{layer}"] = y

    for name, block, repeats in self.stages:
      for i in range(repeats):
        own, place = params[name], name
        if repeats > 1:
          own = jax.tree.map(lambda a, i=i: a[i], own)
          place = f"{name}/{i}"
        x = block(own, x, functools.partial(see, place))
    return seen

  def _specs(self) -> list[PyTree]:
    """What one block of each stage needs."""
    specs = []
    x, _ = self.batch(1)
    for stage in self.stages:
      specs.append(stage.block.specs(x))
      x = after(stage.block, x)
    return specs


def cross_entropy(logits: Array, labels: Array) -> Array:
  """Its mean over the examples."""
  losses = optax.losses.softmax_cross_entropy_with_integer_labels
  return losses(logits, labels).mean()


def _draw(repeats: int, specs: PyTree, key: Array) -> PyTree:
  """Draws all parameters of a stage at once: few draws compile fast."""
  leaves, treedef = jax.tree.flatten(specs)
  lead = (repeats,) if repeats > 1 else ()
  sizes = [math.prod(spec.shape) * bool(spec.deviation) for spec in leaves]
  noise = jax.random.normal(key, (*lead, sum(sizes)))
  arrays = []
  for spec, end, size in zip(leaves, np.cumsum(sizes), sizes, strict=True):
    shape = (*lead, *spec.shape)
    if size:
      drawn = noise[..., end - size : end].reshape(shape)
      arrays.append(spec.mean + spec.deviation * drawn)
    else:
      arrays.append(jnp.full(shape, spec.mean))
  return jax.tree.unflatten(treedef, arrays)


def _chain(block: Block, params: PyTree, x: Array) -> Array:
  """Several repeats, one after the other."""
  for i in range(len(jax.tree.leaves(params)[0])):
    x = block(jax.tree.map(lambda a, i=i: a[i], params), x)
  return x


def _cut(a: Array, size: int) -> Array:
  """Repeats, so many at a time; all at once as they are."""
  return a if len(a) == size else a.reshape(-1, size, *a.shape[1:])


def repeat(block: Block, params: PyTree, x: Array) -> Array:
  """Runs a block with one row of its parameters after the other."""

  def step(x: Array, own: PyTree) -> tuple[Array, None]:
    return block(own, x), None

  x, _ = lax.scan(step, x, params)
  return x
