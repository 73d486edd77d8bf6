"""Checks of the arguments of the checks, and what they raise."""

from typing import Any

import jax
import numpy as np

from jaxmotion import core
from jaxmotion.codecs.extend import check_codec


def check_codec_and_array(codec: Any, name: str, x: Any) -> None:
  """Raises unless the arguments are a codec of arrays and an array for it."""
  check_codec("codec", codec)
  check_array(name, x)


def check_array(name: str, x: Any) -> None:
  """Raises unless an argument is a floating-point array with values."""
  noun = "a floating-point array outside of jit"
  core.check_instance(name, x, (jax.Array, np.ndarray), noun)
  if isinstance(x, jax.core.Tracer):
    raise TypeError(f"`{name}` must be {noun}, got {x!r}.")
  core.check_float(name, x)


def require(holds: bool, message: str) -> None:
  """Raises an AssertionError unless a property holds."""
  if not holds:
    raise AssertionError(message)
