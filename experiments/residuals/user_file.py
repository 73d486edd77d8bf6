"""Losses of files that users wrote."""

import functools
import importlib.util
import inspect
import pathlib
import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from experiments.common.console import JobError
from experiments.models.losses import Task

_FORM = "must return (loss_fn, params, batch)"


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
  path, _, name = text.rpartition(":")
  if not path.endswith(".py") or not name:
    raise JobError(f"`--file` must be FILE.py:FUNCTION, got {text!r}.")
  function = getattr(_load_module(path), name, None)
  if not callable(function):
    raise JobError(f"`--file` must name a function of {path!r}, got {name!r}.")

  @functools.wraps(function)
  def make_task(*args: Any, **kwargs: Any) -> Task:
    return _check_task(_call(text, function, *args, **kwargs), text)

  make_task.__signature__ = inspect.signature(function)  # type: ignore[attr-defined]
  make_task()
  return make_task


def _load_module(path: str) -> Any:
  if not pathlib.Path(path).is_file():
    raise JobError(f"`--file` must name a file that exists, got {path!r}.")
  folder = str(pathlib.Path(path).resolve().parent)
  if folder not in sys.path:
    sys.path.append(folder)  # The file may import its neighbors.
  spec = importlib.util.spec_from_file_location(pathlib.Path(path).stem, path)
  assert spec is not None and spec.loader is not None
  module = importlib.util.module_from_spec(spec)
  # Dataclasses look their module up by its name.
  sys.modules.setdefault(spec.name, module)
  _call(path, spec.loader.exec_module, module)
  return module


def _call(
  text: str, function: Callable[..., Any], *args: Any, **kw: Any
) -> Any:
  """Calls what a user wrote, which can raise anything."""
  try:
    return function(*args, **kw)
  except Exception as error:
    line = " ".join(str(error).split())
    raise JobError(f"{text!r} raises {type(error).__name__}: {line}") from error


def _check_task(found: Any, text: str) -> Task:
  if not isinstance(found, tuple) or len(found) != 3:
    kind = type(found).__name__
    size = f" of {len(found)}" if isinstance(found, tuple) else ""
    raise JobError(f"{text!r} {_FORM}, got a {kind}{size}.")
  loss_fn, params, batch = found
  if not callable(loss_fn):
    raise JobError(f"{text!r} {_FORM}, got {loss_fn!r} for `loss_fn`.")
  for leaf in jax.tree.leaves((params, batch)):
    if not hasattr(leaf, "dtype") and not isinstance(leaf, bool | int | float):
      raise JobError(
        f"{text!r}: `params` and `batch` must hold arrays or shapes, got"
        f" {leaf!r}."
      )
  params, batch = jax.eval_shape(lambda *trees: trees, params, batch)
  if not jax.tree.leaves(params):
    raise JobError(f"{text!r} {_FORM}, got `params` without arrays.")
  loss = _call(text, jax.eval_shape, loss_fn, params, batch)
  shape = getattr(loss, "shape", None)
  if shape != () or not jnp.issubdtype(loss.dtype, jnp.floating):
    raise JobError(
      f"{text!r}: `loss_fn` must return one floating-point number, got {loss}."
    )
  return Task(loss_fn, params, batch)
