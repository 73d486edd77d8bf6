"""Losses by name, with options of a command line."""

import functools
import json
from collections.abc import Callable

from experiments.models.losses.blocks import make_blocks
from experiments.models.losses.experts import make_experts
from experiments.models.losses.images import make_classifier_task
from experiments.models.losses.state_space import make_state_space
from experiments.models.losses.task import Task
from experiments.models.losses.transformer import make_transformer
from experiments.models.losses.unet import make_unet

TASKS: dict[str, Callable[..., Task]] = {
  "gpt": make_transformer,
  "gpt_flash": functools.partial(make_transformer, flash=True),
  "gpt_unrolled": functools.partial(make_transformer, unroll=True),
  "gpt_unrolled_flash": functools.partial(
    make_transformer, unroll=True, flash=True
  ),
  "resnet50": functools.partial(make_classifier_task, network="resnet50"),
  "resnet101": functools.partial(make_classifier_task, network="resnet101"),
  "unet": make_unet,
  "moe": make_experts,
  "ssm": make_state_space,
  "mlp_gelu": functools.partial(make_blocks, kind="gelu"),
  "mlp_relu": functools.partial(make_blocks, kind="relu"),
  "mlp_swiglu": functools.partial(make_blocks, kind="swiglu"),
  "norm_dense": functools.partial(make_blocks, kind="norm"),
}
"""Functions of `wrap` and of options that return a `Task`, by name."""


def parse_task(text: str) -> Callable[..., Task]:
  """Returns the function that makes a task of a command line.

  Args:
    text: NAME, followed by :OPTION=VALUE for each option; values are JSON.

  Raises:
    ValueError: there is no such task, or the text has another form.

  Example:
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
