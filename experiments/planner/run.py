"""Advice on the step of a configuration, as tables and rows."""

from typing import Any

import jax
import rich.table
from flax import nnx
from ml_collections import ConfigDict

from experiments.common import records
from experiments.train import tasks
from experiments.train.optimizer import make_optimizer
from jaxmotion import perfmodel, planner


def load_platform(name: str) -> perfmodel.Platform:
  """The platform of a name, or of a JSON file."""
  if name.endswith(".json"):
    return perfmodel.load_platform(name)
  return perfmodel.builtin_platform(name)


def make_plan(
  config: ConfigDict,
  platform: perfmodel.Platform,
  *,
  mesh_axis: str | None = None,
  accuracy_budget: float = 0.1,
  gradients: bool = True,
) -> planner.ExchangePlan:
  """Advises on the step of a configuration.

  Args:
    config: made by a `get_config()`, for `experiments.train`.
    platform: gets as many workers as the configuration has.
    mesh_axis: of the workers; None is the only one that the platform has.
    accuracy_budget: greatest relative error of the gradient.
    gradients: whether errors are measured on a gradient.

  Raises:
    ValueError: the workers do not divide the batch.
  """
  if config.batch_size % config.workers:
    raise ValueError(
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

  def loss(params: Any, batch: tasks.Batch) -> jax.Array:
    return task.loss(nnx.merge(graph, params), batch)

  return planner.advise(
    loss,
    params,
    (batch,),
    platform,
    accuracy_budget=accuracy_budget,
    gradients=jax.jit(jax.grad(loss))(params, batch) if gradients else None,
    optimizer=make_optimizer(config),
    mesh_axis=mesh_axis,
  )


def make_tables(plan: planner.ExchangePlan) -> list[rich.table.Table]:
  """A line for each tensor, and one for each codec by itself."""
  tensors = rich.table.Table(title="Tensors")
  for name in ("tensor", "codec", "method", "bytes/step", "error", "reason"):
    right = name in ("bytes/step", "error")
    tensors.add_column(name, justify="right" if right else "left")
  for c in plan.choices:
    sent, error = f"{c.wire_bytes:,.0f}", f"{c.error:.2g}"
    name = planner.format_codec(c.codec)
    tensors.add_row(c.path, name, c.method, sent, error, c.reason)
  codecs = rich.table.Table(
    title="The plan, and one codec for all",
    caption="Predicted. A codec alone may not fit in the budget.",
  )
  codecs.add_column("codec")
  for name in ("step ms", "speed-up"):
    codecs.add_column(name, justify="right")
  alone = {planner.format_codec(c): s for c, s in plan.uniform_s.items()}
  for name, seconds in {"the plan": plan.step.total_s, **alone}.items():
    speed_up = plan.uncompressed.total_s / seconds
    codecs.add_row(name, f"{1e3 * seconds:.4g}", f"{speed_up:.2f}")
  return [tensors, codecs]


def make_rows(experiment: str, plan: planner.ExchangePlan) -> list[records.Row]:
  """Rows of the plan, of each codec alone and of each tensor.

  Args:
    experiment: what to call it.
    plan: made by `run`.
  """
  stamp = plan.platform.name, jax.__version__
  alone = {planner.format_codec(c): s for c, s in plan.uniform_s.items()}
  plain_ms = 1e3 * plan.uncompressed.total_s
  rows = []
  for case, seconds in {"plan": plan.step.total_s, **alone}.items():
    named, ms = (experiment, case, "step_ms_predicted"), 1e3 * seconds
    rows.append(
      records.Row(*named, ms, "ms", plain_ms, ms / plain_ms, None, *stamp)
    )
  facts: list[tuple[str, str, float | str, str]] = [
    ("plan", "wire_bytes_predicted", plan.step.wire_bytes, "bytes/step/worker"),
    ("plan", "gradient_error", plan.error, "1"),
    ("plan", "reason", plan.reason, "text"),
  ]
  for c in plan.choices:
    facts += [
      (c.path, "codec", repr(c.codec), "text"),
      (c.path, "method", c.method, "text"),
      (c.path, "wire_bytes_predicted", c.wire_bytes, "bytes/step/worker"),
      (c.path, "gradient_error", c.error, "1"),
      (c.path, "reason", c.reason, "text"),
    ]
  return rows + [
    records.Row(experiment, *fact, None, None, None, *stamp) for fact in facts
  ]
