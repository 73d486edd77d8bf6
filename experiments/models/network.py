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

from experiments.models import layers
from jaxmotion import core
from jaxmotion.core import Array, PyTree, ShapedLike

Block = Callable[[PyTree, Array], Array]
Wrap = Callable[[Block, str], Block]


class Stage(NamedTuple):
  """One block of a network, run once or several times."""

  name: str  # Key of the stage's parameters.
  block: layers.Layer  # `block(params, x) -> x`, hashable.
  # Number of times the block runs, each with its own parameters. The parameters
  # of more than one repeat are stacked along a leading axis, and the output has
  # the shape of the input.
  repeats: int = 1


@dataclasses.dataclass(frozen=True)
class Network:
  """A network without state: each stage reads the output of the one before."""

  name: str  # The network's name.
  stages: tuple[Stage, ...]  # From inputs to logits.
  input: jax.ShapeDtypeStruct  # Shape and dtype of one example.
  label: jax.ShapeDtypeStruct  # Shape and dtype of one example's labels.

  def init(self, key: Array) -> PyTree:
    """Returns initial float32 parameters: one tree per stage, by its name."""
    keys = jax.random.split(key, len(self.stages))
    return {
      stage.name: _draw_params(stage.repeats, specs, own_key)
      for stage, specs, own_key in zip(
        self.stages, self._block_specs(), keys, strict=True
      )
    }

  @property
  def params(self) -> PyTree:
    """The shapes of the parameters."""
    return jax.eval_shape(self.init, jax.random.key(0))

  @property
  def size(self) -> int:
    """The number of parameters."""
    return sum(math.prod(a.shape) for a in jax.tree.leaves(self.params))

  def batch(self, size: int) -> tuple[ShapedLike, ShapedLike]:
    """Returns the shapes of `size` examples and of their labels."""
    one = self.input, self.label
    inputs, labels = (
      jax.ShapeDtypeStruct((size, *a.shape), a.dtype) for a in one
    )
    return inputs, labels

  def apply(
    self, params: PyTree, x: Array, wrap: Wrap | None = None, together: int = 1
  ) -> Array:
    """Returns the logits of a batch."""
    for name, block, repeats in self.stages:
      size = max(n for n in range(1, together + 1) if repeats % n == 0)
      run: Block = block if size == 1 else functools.partial(_run_all, block)
      run = wrap(run, name) if wrap else run
      own = params[name]
      if size > 1:
        own = jax.tree.map(lambda a, n=size: _group_repeats(a, n), own)
      x = scan_block(run, own, x) if repeats > size else run(own, x)
    return x

  def loss(
    self,
    params: PyTree,
    batch: tuple[Array, Array],
    wrap: Wrap | None = None,
    together: int = 1,
  ) -> Array:
    """Returns the mean cross-entropy of a batch."""
    inputs, labels = batch
    logits = self.apply(params, inputs, wrap, together)
    return cross_entropy(logits, labels)

  def activations(self, params: PyTree, x: Array) -> dict[str, Array]:
    """Returns the outputs of every ReLU and every pooling over windows."""
    seen: dict[str, Array] = {}

    def record(place: str, layer: str, y: Array) -> None:
      seen[f"{place}/{layer}"] = y

    for name, block, repeats in self.stages:
      for i in range(repeats):
        own, place = params[name], name
        if repeats > 1:
          own = jax.tree.map(lambda a, i=i: a[i], own)
          place = f"{name}/{i}"
        x = block(own, x, functools.partial(record, place))
    return seen

  def _block_specs(self) -> list[PyTree]:
    """Returns the parameters that one block of each stage needs."""
    specs = []
    x, _ = self.batch(1)
    for stage in self.stages:
      specs.append(stage.block.specs(x))
      x = layers.output_shape(stage.block, x)
    return specs


@core.declare(image=core.integer(32))
def make_classifier(name: str, stages: list[Stage], image: int) -> Network:
  """Returns a network of square color images."""
  pixels = jax.ShapeDtypeStruct((image, image, 3), "float32")
  label = jax.ShapeDtypeStruct((), "int32")
  return Network(name, tuple(stages), pixels, label)


def scale_widths(sizes: tuple[int, ...], width: float) -> tuple[int, ...]:
  """Returns sizes multiplied by `width`, rounded, at least 1."""
  if not 0 < width < math.inf:
    raise ValueError(f"`width` must be a positive number, got {width!r}.")
  return tuple(max(1, round(n * width)) for n in sizes)


def cross_entropy(logits: Array, labels: Array) -> Array:
  """Returns the mean cross-entropy over the examples."""
  losses = optax.losses.softmax_cross_entropy_with_integer_labels
  return losses(logits, labels).mean()


def scan_block(block: Block, params: PyTree, x: Array) -> Array:
  """Runs a block once for each row of its stacked parameters, in a scan."""

  def step(x: Array, own: PyTree) -> tuple[Array, None]:
    return block(own, x), None

  x, _ = lax.scan(step, x, params)
  return x


def _draw_params(repeats: int, specs: PyTree, key: Array) -> PyTree:
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


def _run_all(block: Block, params: PyTree, x: Array) -> Array:
  """Runs a block once for each row of its stacked parameters, unrolled."""
  for i in range(len(jax.tree.leaves(params)[0])):
    x = block(jax.tree.map(lambda a, i=i: a[i], params), x)
  return x


def _group_repeats(a: Array, size: int) -> Array:
  """Stacks rows in groups of `size`; one group needs no new axis."""
  return a if len(a) == size else a.reshape(-1, size, *a.shape[1:])
