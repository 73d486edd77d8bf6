"""Argument checks that `advise` and `fit_memory` share."""

from __future__ import annotations

from typing import Any

from jaxmotion.perfmodel import Platform


def check_batch(batch: Any) -> None:
  """Raises unless `batch` is a tuple of arguments.

  Args:
    batch: the caller's arguments after the parameters.

  Raises:
    TypeError: not a tuple; an array would otherwise be split by its rows.

  >>> check_batch([1])
  Traceback (most recent call last):
  ...
  TypeError: `batch` must be a tuple of the arguments after `params`, got a \
list: write `(batch,)` for a single argument.
  """
  if not isinstance(batch, tuple):
    raise TypeError(
      "`batch` must be a tuple of the arguments after `params`, got a "
      f"{type(batch).__name__}: write `(batch,)` for a single argument."
    )


def check_platform(platform: Any) -> None:
  """Raises unless `platform` is a `perfmodel.Platform`.

  Args:
    platform: what the caller gave.

  Raises:
    TypeError: not a platform.
  """
  if not isinstance(platform, Platform):
    raise TypeError(
      f"`platform` must be a perfmodel.Platform, got {platform!r}: see "
      "perfmodel.builtin_platform and perfmodel.load_platform."
    )
