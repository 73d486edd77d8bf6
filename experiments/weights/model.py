"""Flax modules as the stages of `memory.HostResident`: functions and trees."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from experiments.train import tasks

Tree = Any


@dataclasses.dataclass(frozen=True)
class Stage:
  """A stage as a function; equal stages are equal functions."""

  graph: nnx.GraphDef  # The stage's module without its arrays.
  first: bool  # Whether the input is the batch's pixels.
  last: bool  # Whether the output is the batch's mean loss.

  def __call__(
    self, params: Tree, stats: Tree, x: jax.Array | None, batch: tasks.Batch
  ) -> tuple[jax.Array, Tree]:
    """Returns the next stage's input, or the loss, and new statistics."""
    stage = nnx.merge(self.graph, params, stats)
    y = stage(batch["pixels"] if self.first else x)
    if self.last:
      y = optax.softmax_cross_entropy_with_integer_labels(
        y, batch["labels"]
      ).mean()
    return y, _select_arrays(stage, nnx.BatchStat)

  def evaluate(self, params: Tree, stats: Tree, x: jax.Array) -> jax.Array:
    """Returns the output under the running statistics of training."""
    stage = nnx.merge(self.graph, params, stats)
    stage.eval()
    return stage(x)


class Model(NamedTuple):
  """A network of one seed, as functions and trees."""

  stages: tuple[tuple[str, Stage], ...]  # Names and functions.
  params: dict[str, Tree]  # Parameters by the name of the stage.
  # Running statistics of batch norm by the name of the stage.
  stats: dict[str, Tree]


def as_model(stages: list[nnx.Module]) -> Model:
  """Splits the modules of a network into functions and trees."""
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
    {name: _select_arrays(stage, nnx.Param) for name, stage in named},
    {name: _select_arrays(stage, nnx.BatchStat) for name, stage in named},
  )


def abstract_model(make: Callable[[], list[nnx.Module]]) -> Model:
  """Returns `as_model` of a network with shapes in place of arrays."""
  found: list[Any] = []

  def trace() -> tuple[dict, dict]:
    model = as_model(make())
    found.append(model.stages)
    return model.params, model.stats

  params, stats = jax.eval_shape(trace)
  return Model(found[0], params, stats)


class StageCost(NamedTuple):
  """Size and work of one stage."""

  weights: int  # Number of parameters.
  flops: float  # Floating-point operations of the forward pass.


def stage_costs(model: Model, pixels: jax.ShapeDtypeStruct) -> list[StageCost]:
  """Returns the cost of each stage, from its shapes and its lowered program."""
  costs, x = [], pixels
  for name, stage in model.stages:
    args = model.params[name], model.stats[name], x
    leaves = jax.tree.leaves(args[0])
    lowered = jax.jit(stage.evaluate).lower(*args)
    analysis: dict[str, float] = lowered.cost_analysis() or {}
    size = sum(leaf.size for leaf in leaves)
    costs.append(StageCost(size, analysis["flops"]))
    x = jax.eval_shape(stage.evaluate, *args)
  return costs


@functools.partial(jax.jit, static_argnums=0)
def count_correct(
  stages: tuple[tuple[str, Stage], ...],
  params: dict[str, Tree],
  stats: tuple[Tree, ...],
  batch: tasks.Batch,
) -> jax.Array:
  """Returns the summed weights of the correctly classified examples."""
  x = jnp.asarray(batch["pixels"])
  for (name, stage), own_stats in zip(stages, stats, strict=True):
    x = stage.evaluate(params[name], own_stats, x)
  correct = jnp.argmax(x, axis=-1) == batch["labels"]
  return jnp.sum(jnp.where(correct, batch["weight"], 0.0))


def _select_arrays(stage: nnx.Module, kind: Any) -> Tree:
  return nnx.to_pure_dict(nnx.state(stage, kind))
