"""Losses of other people's style that policies of saving are compared on.

Each function takes `wrap`, a hook around the model's blocks, and returns a
`Task`: the loss, and the shapes of its parameters and of its batch.
"""

from experiments.models.losses.catalog import (
  TASKS as TASKS,
  parse_task as parse_task,
)
from experiments.models.losses.task import (
  Task as Task,
  Wrap as Wrap,
  run_plain as run_plain,
)
