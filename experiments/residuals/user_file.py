"""Losses of files that users wrote."""

import functools
import inspect
from collections.abc import Callable
from typing import Any

from experiments.common import console
from experiments.models import losses
from jaxmotion.command.extend import (
  CommandError,
  call_user,
  check_task,
  load_function,
)


def load_task(text: str) -> Callable[..., losses.Task]:
  """Returns the function of a user's file, its result checked."""
  try:
    function = load_function("--file", text)
  except CommandError as error:
    raise console.JobError(str(error)) from error

  @functools.wraps(function)
  def make_task(*args: Any, **kwargs: Any) -> losses.Task:
    try:
      found = call_user(text, function, *args, **kwargs)
      return losses.Task(*check_task(text, found))
    except CommandError as error:
      raise console.JobError(str(error)) from error

  make_task.__signature__ = inspect.signature(function)  # type: ignore[attr-defined]
  make_task()
  return make_task
