"""A network as the host-resident store wants it: functions and trees."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from experiments.train.tasks import Batch

Tree = Any


@dataclasses.dataclass(frozen=True)
class Stage:
  """A stage as a function; equal stages are equal functions.

  Attributes:
    graph: what the stage computes, without its arrays.
    first: whether it takes the batch's pixels.
    last: whether it returns the batch's mean loss.
  """

  graph: nnx.GraphDef
  first: bool
  last: bool

  def __call__(
    self, params: Tree, stats: Tree, x: jax.Array | None, batch: Batch
  ) -> tuple[jax.Array, Tree]:
    """Returns the next stage's input, or the loss, and new statistics."""
    stage = nnx.merge(self.graph, params, stats)
    y = stage(batch["pixels"] if self.first else x)
    if self.last:
      y = optax.softmax_cross_entropy_with_integer_labels(
        y, batch["labels"]
      ).mean()
    return y, _pure(stage, nnx.BatchStat)

  def evaluate(self, params: Tree, stats: Tree, x: jax.Array) -> jax.Array:
    """Returns the output with the statistics that training has gathered."""
    stage = nnx.merge(self.graph, params, stats)
    stage.eval()
    return stage(x)


class Model(NamedTuple):
  """A network of one seed.

  Attributes:
    stages: names and functions.
    params: trees by name.
    stats: trees by name: what batch norm keeps.
  """

  stages: tuple[tuple[str, Stage], ...]
  params: dict[str, Tree]
  stats: dict[str, Tree]


def as_model(stages: list[nnx.Module]) -> Model:
  """Takes the stages of a network apart."""
  names = [
    f"{i:02d}_{type(stage).__name__.lower()}" for i, stage in enumerate(stages)
  ]
  functions = [
    Stage(nnx.graphdef(stage), first=not i, last=i + 1 == len(stages))
    for i, stage in enumerate(stages)
  ]
  named = list(zip(names, stages, strict=True))
  return Model(
    tuple(zip(names, functions, strict=True)),
    {name: _pure(stage, nnx.Param) for name, stage in named},
    {name: _pure(stage, nnx.BatchStat) for name, stage in named},
  )


def abstract(make: Callable[[], list[nnx.Module]]) -> Model:
  """`as_model` of a network that is never made: shapes in place of arrays.

  Args:
    make: returns the stages.
  """
  found: list[Any] = []

  def trace() -> tuple[dict, dict]:
    model = as_model(make())
    found.append(model.stages)
    return model.params, model.stats

  params, stats = jax.eval_shape(trace)
  return Model(found[0], params, stats)


class Cost(NamedTuple):
  """What a stage weighs.

  Attributes:
    weights: its parameters.
    flops: floating-point operations of its forward pass.
  """

  weights: int
  flops: float


def costs(model: Model, pixels: jax.ShapeDtypeStruct) -> list[Cost]:
  """What each stage weighs, by its shapes and its traced program.

  Args:
    model: arrays or shapes.
    pixels: f32 `(batch, height, width, channels)`.
  """
  found, x = [], pixels
  for name, stage in model.stages:
    args = model.params[name], model.stats[name], x
    leaves = jax.tree.leaves(args[0])
    lowered = jax.jit(stage.evaluate).lower(*args)
    analysis: dict[str, float] = lowered.cost_analysis() or {}
    size = sum(leaf.size for leaf in leaves)
    found.append(Cost(size, analysis["flops"]))
    x = jax.eval_shape(stage.evaluate, *args)
  return found


@functools.partial(jax.jit, static_argnums=0)
def hits(
  stages: tuple[tuple[str, Stage], ...],
  params: dict[str, Tree],
  stats: tuple[Tree, ...],
  batch: Batch,
) -> jax.Array:
  """Returns the weights of the examples that are classified right, summed.

  Args:
    stages: of a model.
    params: by the names of the stages.
    stats: in the order of the stages.
    batch: with a `weight` for each example.
  """
  x = jnp.asarray(batch["pixels"])
  for (name, stage), own in zip(stages, stats, strict=True):
    x = stage.evaluate(params[name], own, x)
  right = jnp.argmax(x, axis=-1) == batch["labels"]
  return jnp.sum(jnp.where(right, batch["weight"], 0.0))


def _pure(stage: nnx.Module, kind: Any) -> Tree:
  return nnx.to_pure_dict(nnx.state(stage, kind))
