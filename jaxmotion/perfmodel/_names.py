"""Names of kernels and collectives, by which curves and rates are found.

A name that nothing looks up would be ignored in silence, so that platforms
refuse it.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

KINDS = (
  "matmul",
  "convolution",
  "elementwise",
  "reduction",
  "data_movement",
  "gather_scatter",
  "random",
  "collective",
  "other",
)
MATMULS = ("matmul", "convolution")
COLLECTIVES = (
  "all_reduce",
  "reduce_scatter",
  "all_gather",
  "all_to_all",
  "collective_permute",
  "broadcast",
)
_CODING = ("encode", "decode", "add")


def check_dtype_name(name: str, value: Any) -> None:
  """Raises unless `value` is the name that JAX gives a dtype.

  Args:
    name: the argument's name, for the message.
    value: what the caller gave.

  Raises:
    ValueError: no dtype has this name; "f4" is another name of "float32".

  >>> check_dtype_name("dtype", "flaot32")
  Traceback (most recent call last):
  ...
  ValueError: `dtype` must be the name of a dtype, got 'flaot32'.
  """
  try:
    known = isinstance(value, str) and jnp.dtype(value).name == value
  except TypeError:
    known = False
  if not known:
    raise ValueError(f"`{name}` must be the name of a dtype, got {value!r}.")


def check_kernel_name(name: str, value: str) -> None:
  """Raises unless curves of a device are looked up by this name."""
  kind, _, rest = value.partition(" ")
  if kind in MATMULS and rest:
    check_dtype_name(name, rest)
    return
  if kind in _CODING and rest:
    return
  kinds = [k for k in KINDS if k not in MATMULS]
  if value not in kinds:
    shown = [f"{k} DTYPE" for k in MATMULS] + [f"{k} CODEC" for k in _CODING]
    raise ValueError(
      f"`{name}` must be one of {(*shown, *kinds)}, got {value!r}."
    )


def check_collective_name(name: str, value: str) -> None:
  """Raises unless curves of a link are looked up by this name."""
  op, _, workers = value.partition(" ")
  if op not in COLLECTIVES or not workers.isdecimal():
    raise ValueError(
      f"`{name}` must be a collective and its number of workers, such as "
      f"'all_reduce 4', got {value!r}: collectives are {COLLECTIVES}."
    )
