"""Losses by name, with options of a command line."""

import functools
import json
from collections.abc import Callable

from experiments.models import catalog
from experiments.models.losses import (
  blocks,
  encoder_decoder,
  experts,
  graph,
  llama,
  recurrent,
  state_space,
  task,
  transformer,
  unet,
  vision,
)


def make_classifier_task(
  wrap: task.Wrap = task.run_plain,
  *,
  network: str,
  batch: int = 32,
  **options: int,
) -> task.Task:
  """Returns the loss of a network of `make_network`."""
  net = catalog.make_network(network, **options)
  return task.Task(
    lambda params, batch: net.loss(params, batch, lambda b, _: wrap(b)),
    net.params,
    net.batch(batch),
  )


TASKS: dict[str, Callable[..., task.Task]] = {
  "gpt": transformer.make_transformer,
  "gpt_flash": functools.partial(transformer.make_transformer, flash=True),
  "gpt_unrolled": functools.partial(transformer.make_transformer, unroll=True),
  "gpt_unrolled_flash": functools.partial(
    transformer.make_transformer, unroll=True, flash=True
  ),
  "resnet50": functools.partial(make_classifier_task, network="resnet50"),
  "resnet101": functools.partial(make_classifier_task, network="resnet101"),
  "unet": unet.make_unet,
  "moe": experts.make_experts,
  "ssm": state_space.make_state_space,
  "llama": llama.make_llama,
  "encoder_decoder": encoder_decoder.make_encoder_decoder,
  "lstm": recurrent.make_lstm,
  "graph": graph.make_graph_network,
  "vision": vision.make_vision_transformer,
  "convnext": vision.make_convnext,
  "mlp_gelu": functools.partial(blocks.make_blocks, kind="gelu"),
  "mlp_relu": functools.partial(blocks.make_blocks, kind="relu"),
  "mlp_swiglu": functools.partial(blocks.make_blocks, kind="swiglu"),
  "norm_dense": functools.partial(blocks.make_blocks, kind="norm"),
}
"""Functions of `wrap` and of options that return a `Task`, by name."""


def parse_task(text: str) -> Callable[..., task.Task]:
  """Returns the function that makes a task of a command line.

  >>> task = parse_task("mlp_relu:blocks=2:width=8:rows=4")()
  >>> len(task.params), task.batch.shape
  (2, (4, 8))
  """
  name, *options = text.split(":")
  if name not in TASKS:
    raise ValueError(
      f"`models` must be some of {', '.join(TASKS)}, got {name!r}."
    )
  try:
    pairs = [option.split("=") for option in options]
    found = {key: json.loads(value) for key, value in pairs}
  except ValueError as e:
    raise ValueError(
      f"`models` must be NAME or NAME:OPTION=VALUE, got {text!r}."
    ) from e
  return functools.partial(TASKS[name], **found)
