"""Formats codecs, seconds and bytes for the sentences of plans."""

import dataclasses
from collections.abc import Collection
from typing import Any

from jaxmotion import codecs, core


@core.declare(codec=core.instance(codecs.Codec, "a codec"))
def format_codec(codec: codecs.Codec) -> str:
  """Returns the shortest expression that constructs a codec.

  Args:
    codec: any codec.

  Example:
    >>> from jaxmotion import codecs
    >>> format_codec(codecs.feedback(codecs.uniform(bits=4)))
    'feedback(uniform(bits=4))'
  """
  return _format_value(codec)


def _format_value(value: Any) -> str:
  """Returns an expression of a field; a codec shows no default options."""
  if not isinstance(value, codecs.Codec):
    return repr(value)
  parts: list[str] = []
  for field in dataclasses.fields(value):
    own = getattr(value, field.name)
    if own == field.default:
      continue
    if isinstance(own, tuple) and all(isinstance(c, codecs.Codec) for c in own):
      parts += map(_format_value, own)
    else:
      name = f"{field.name}=" if field.kw_only is True else ""
      parts.append(name + _format_value(own))
  return f"{type(value).__name__}({', '.join(parts)})"


def format_seconds(value: float) -> str:
  """Returns seconds as text, in s, ms or us."""
  for unit, name in ((1.0, "s"), (1e-3, "ms")):
    if value >= unit:
      return f"{value / unit:.3g} {name}"
  return f"{value * 1e6:.3g} us"


def name_places(axes: Collection[str], wire: str) -> list[str]:
  """Returns what bytes over each axis are called: `wire` if it is the only."""
  return [wire] if len(axes) == 1 else [f"over {axis!r}" for axis in axes]


def format_bytes(value: float) -> str:
  """Returns bytes as text, in GB, MB, kB or B."""
  for unit, name in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
    if value >= unit:
      return f"{value / unit:.3g} {name}"
  return f"{value:.3g} B"
