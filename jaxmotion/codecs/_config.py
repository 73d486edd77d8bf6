"""Codecs from their configurations as plain data."""

import dataclasses
from typing import Any

from jaxmotion.codecs import _codec


def from_config(config: dict[str, Any]) -> _codec.Codec:
  """Constructs the codec that `config` describes.

  Args:
    config: what `Codec.config` returned, also after a round trip through JSON.

  Returns:
    An equal codec.

  Raises:
    TypeError: `config` is no dict.
    ValueError: the name is no codec's or that of two classes of your own, or a
      field is none of its fields.

  Example:
    >>> from jaxmotion import codecs
    >>> codec = codecs.feedback(codecs.uniform(bits=4))
    >>> codecs.from_config(codec.config()) == codec
    True
  """
  if not isinstance(config, dict):
    raise TypeError(
      f"`config` must be a dict that `Codec.config` returned, got {config!r}."
    )
  fields = dict(config)
  name = fields.pop("name", None)
  kind = _codec_type(name)
  known = [f.name for f in dataclasses.fields(kind)]
  for field in fields:
    if field not in known:
      raise ValueError(
        f"`config` of codec {name!r} must have fields of {known}, "
        f"got {field!r}."
      )
  return kind._from_fields({k: _from_plain(v) for k, v in fields.items()})


def _codec_type(name: Any) -> type[_codec.Codec]:
  """Returns the class of codecs with this name."""
  kinds = _codec.codec_types(_codec.Codec)
  found = [kind for kind in kinds if kind.__name__ == name]
  if not found:
    names = ", ".join(sorted({kind.__name__ for kind in kinds}))
    raise ValueError(
      f"`name` of a codec in `config` must be one of {names}, got {name!r}."
    )
  # A class that was refused for its name lives on in its traceback.
  found = [kind for kind in found if _codec.is_own(kind)] or found
  places = {f"{kind.__module__}.{kind.__qualname__}" for kind in found}
  if len(places) > 1:
    raise ValueError(
      f"`name` of a codec must be that of one class, got {name!r}, which "
      f"{' and '.join(sorted(places))} have: rename one of them."
    )
  # A class that a notebook defines again replaces the one before.
  return found[-1]


def _from_plain(value: Any) -> Any:
  if isinstance(value, dict):
    return from_config(value)
  if isinstance(value, list | tuple):
    return tuple(_from_plain(v) for v in value)
  return value
