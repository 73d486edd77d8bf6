"""Checks of what a caller gives a host-resident model."""

import contextlib
from collections.abc import Callable
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np

from jaxmotion import core, wire
from jaxmotion.codecs import Codec
from jaxmotion.codecs.extend import check_codec
from jaxmotion.memory.weights import _layout, _state


def resolve_codecs(weights: Any) -> tuple[Codec, ...]:
  """Returns the codec of each level, checked."""
  codecs = (
    (weights,)
    if isinstance(weights, Codec)
    else core.check_sequence("weights", weights, "codecs, or one codec")
  )
  if not codecs:
    raise ValueError("`weights` must hold at least one codec, got none.")
  sample = jax.ShapeDtypeStruct((2**16,), jnp.float32)
  for codec in codecs:
    check_codec("weights", codec)
    if codec.has_state:
      raise ValueError(
        f"`weights` must be codecs without state, got {codec!r}: use "
        "`send_difference`, which sends later what was left out."
      )
  sizes = [wire.payload_bytes(codec, sample) for codec in codecs]
  if sizes != sorted(sizes):
    raise ValueError(
      f"`weights` must be ordered from fewest to most bytes, got {codecs!r}."
    )
  return codecs


def resolve_dtype(dtype: Any) -> str:
  """Returns the name of a dtype, checked."""
  name = dtype
  with contextlib.suppress(TypeError):
    name = jnp.dtype(dtype).name if dtype is not None else None
  core.check_choice("device_dtype", name, _layout.DEVICE_DTYPES)
  return cast(str, name)


def check_stages(stages: Any) -> tuple[tuple[str, Callable[..., Any]], ...]:
  """Returns the stages as a tuple of pairs, checked."""
  noun = "pairs of a name and a function, or one function"
  pairs = core.check_sequence("stages", stages, noun)
  if not pairs:
    raise ValueError("`stages` must hold at least one stage, got none.")
  for pair in pairs:
    is_pair = isinstance(pair, list | tuple) and len(pair) == 2
    if not is_pair or not isinstance(pair[0], str) or not callable(pair[1]):
      raise TypeError(
        f"`stages` must be pairs of a name and a function, got {pair!r}."
      )
  names = [name for name, _ in pairs]
  if len(set(names)) < len(names):
    raise ValueError(f"`stages` must have different names, got {names!r}.")
  return tuple((name, function) for name, function in pairs)


def check_state(state: Any) -> None:
  """Raises unless `state` is one that `init` returns."""
  core.check_instance("state", state, _state.HostState, "a HostState")
  _layout.check_outside_jit("state", state)
  if np.shape(state.step) != ():
    raise ValueError(
      f"`state` must be that of `init`, got a step of shape "
      f"{np.shape(state.step)}, not ()."
    )
