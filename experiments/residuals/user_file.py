"""Losses of files that users wrote."""

import functools
import inspect
from collections.abc import Callable
from typing import Any

from experiments.common.console import JobError
from experiments.models.losses import Task
from jaxmotion.command.extend import (
  CommandError,
  call_user,
  check_task,
  load_function,
)


def load_task(text: str) -> Callable[..., Task]:
  """Returns the function of a user's file, its result checked.

  Args:
    text: FILE.py:FUNCTION. The function takes nothing, or `wrap`, and returns
      `(loss_fn, params, batch)`: arrays or shapes, and a function (params,
      batch) -> loss. With `wrap`, it passes each of the model's blocks through
      `wrap(block)`; by default that should be the block itself.

  Returns:
    A function with the same parameters that returns a `Task`.

  Raises:
    JobError: there is no such file or function, it raises, or it returns
      something else.
  """
  try:
    function = load_function("--file", text)
  except CommandError as error:
    raise JobError(str(error)) from error

  @functools.wraps(function)
  def make_task(*args: Any, **kwargs: Any) -> Task:
    try:
      found = call_user(text, function, *args, **kwargs)
      return Task(*check_task(text, found))
    except CommandError as error:
      raise JobError(str(error)) from error

  make_task.__signature__ = inspect.signature(function)  # type: ignore[attr-defined]
  make_task()
  return make_task
