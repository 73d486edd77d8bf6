"""Losses of files that users wrote, for a command."""

import importlib.util
import pathlib
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxmotion import core
from jaxmotion.core import PyTree
from jaxmotion.transforms.extend import check_trained

_FORM = "must return (loss_fn, params, batch)"


class CommandError(Exception):
  """Failure that the command line states in one line, without a traceback."""


def name_flags(error: Exception, **flags: str) -> CommandError:
  """Returns a library's error in the words of the command line.

  >>> name_flags(ValueError("`rate` must be 1, got 2."), rate="--speed")
  CommandError('`--speed` must be 1, got 2.')
  """
  text = str(error)
  for argument, flag in flags.items():
    text = text.replace(f"`{argument}`", f"`{flag}`")
  return CommandError(text)


class UserTask(NamedTuple):
  """Training task of a user's file, its arrays as ShapeDtypeStructs."""

  loss_fn: Callable[[PyTree, PyTree], Any]
  params: PyTree
  batch: PyTree


def load_function(argument: str, text: str) -> Callable[..., Any]:
  """Returns the function that a text FILE.py:FUNCTION names."""
  # `argument` is what the text was given as, for messages.
  path, _, name = text.rpartition(":")
  if not path.endswith(".py") or not name:
    raise CommandError(f"`{argument}` must be FILE.py:FUNCTION, got {text!r}.")
  if not pathlib.Path(path).is_file():
    raise CommandError(
      f"`{argument}` must name a file that exists, got {path!r}."
    )
  folder = str(pathlib.Path(path).resolve().parent)
  if folder not in sys.path:
    sys.path.append(folder)  # The file may import its neighbors.
  spec = importlib.util.spec_from_file_location(pathlib.Path(path).stem, path)
  assert spec is not None and spec.loader is not None
  module = importlib.util.module_from_spec(spec)
  # Dataclasses look their module up by its name.
  sys.modules.setdefault(spec.name, module)
  call_user(repr(path), spec.loader.exec_module, module)
  function = getattr(module, name, None)
  if not callable(function):
    raise CommandError(
      f"`{argument}` must name a function of {path!r}, got {name!r}."
    )
  return function


def call_user(
  text: str, function: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
  """Calls what a user wrote, and names it by `text` if it raises."""
  try:
    return function(*args, **kwargs)
  except Exception as error:
    line = " ".join(str(error).split())
    raise CommandError(
      f"{text} raises {type(error).__name__}: {line}"
    ) from error


def check_task(text: str, returned: Any) -> UserTask:
  """Returns what the function that `text` names has returned, as shapes."""
  if not isinstance(returned, tuple) or len(returned) != 3:
    kind = type(returned).__name__
    size = f" of {len(returned)}" if isinstance(returned, tuple) else ""
    raise CommandError(f"{text!r} {_FORM}, got a {kind}{size}.")
  loss_fn, params, batch = returned
  if not callable(loss_fn):
    raise CommandError(f"{text!r} {_FORM}, got {loss_fn!r} for `loss_fn`.")
  for leaf in jax.tree.leaves((params, batch)):
    if not hasattr(leaf, "dtype") and not isinstance(leaf, bool | int | float):
      raise CommandError(
        f"{text!r}: `params` and `batch` must hold arrays or shapes, got "
        f"{leaf!r}."
      )
  params, batch = jax.eval_shape(lambda *trees: trees, params, batch)
  if not jax.tree.leaves(params):
    raise CommandError(f"{text!r} {_FORM}, got `params` without arrays.")
  try:
    check_trained(params)
  except TypeError as error:
    raise CommandError(f"{text!r}: {error}") from error
  try:
    loss = call_user(
      f"`loss_fn(params, batch)` of {text!r}",
      jax.eval_shape,
      loss_fn,
      params,
      batch,
    )
  except CommandError as error:
    kind = type(batch).__name__
    raise CommandError(
      f"{error}; `batch` is a {kind} of {core.shape_strings(batch)}"
    ) from error
  shape = getattr(loss, "shape", None)
  if shape != () or not jnp.issubdtype(loss.dtype, jnp.floating):
    raise CommandError(
      f"{text!r}: `loss_fn` must return one floating-point number, got {loss}."
    )
  return UserTask(loss_fn, params, batch)
