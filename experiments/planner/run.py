"""Plans the exchange of a configuration's training step."""

from typing import Any

import jax
from flax import nnx
from ml_collections import ConfigDict

from experiments.common import console, files
from experiments.train import optimizer, tasks
from jaxmotion import perfmodel, planner
from jaxmotion.command.extend import CommandError, name_flags, read_platform


def load_platform(name: str) -> perfmodel.Platform:
  """Returns the platform of a name, or of a JSON file."""
  try:
    return read_platform(name)
  except CommandError as error:
    raise files.FileError(str(error)) from error


def make_plan(
  config: ConfigDict,
  platform: perfmodel.Platform,
  *,
  mesh_axis: str | None = None,
  accuracy_budget: float = 0.1,
  gradients: bool = True,
) -> planner.ExchangePlan:
  """Plans the exchange of a configuration's training step."""
  if config.batch_size % config.workers:
    raise console.JobError(
      f"`config.batch_size` must be a multiple of the {config.workers} workers,"
      f" got {config.batch_size}."
    )
  if mesh_axis is None and len(platform.axes) == 1:
    mesh_axis = platform.axes[0].name
  if mesh_axis is not None:
    platform = platform.resize(**{mesh_axis: config.workers})
  task = tasks.load_task(config)
  model = task.build(config.seeds[0])
  graph = nnx.graphdef(model)
  params = nnx.to_pure_dict(nnx.state(model, nnx.Param))
  share = config.batch_size // config.workers
  batch = {k: v[:share] for k, v in task.batch(config.seeds[0], 0).items()}

  def loss_fn(params: Any, batch: tasks.Batch) -> jax.Array:
    return task.loss(nnx.merge(graph, params), batch)

  given = jax.jit(jax.grad(loss_fn))(params, batch) if gradients else None
  try:
    return planner.advise(
      loss_fn,
      params,
      (batch,),
      platform,
      accuracy_budget=accuracy_budget,
      gradients=given,
      optimizer=optimizer.make_optimizer(config),
      mesh_axis=mesh_axis,
    )
  except (TypeError, ValueError) as error:
    names = {n: f"--{n}" for n in ("accuracy_budget", "mesh_axis")}
    raise console.JobError(str(name_flags(error, **names))) from error
