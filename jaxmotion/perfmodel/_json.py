"""Reads and writes platforms as dicts and JSON files."""

import dataclasses
import functools
import json
import os
import pathlib
from collections.abc import Mapping
from typing import Any, TypeVar

from jaxmotion import core
from jaxmotion.perfmodel import _figures, _platform

T = TypeVar("T")

# Classes of the fields that hold a dict.
_PARTS: dict[str, type] = {
  "device": _platform.Device,
  "memory_rate": _figures.Rate,
  "to_host": _platform.Link,
  "from_host": _platform.Link,
  "link": _platform.Link,
  "rate": _figures.Rate,
}


@core.declare(platform=_platform.check_platform)
def platform_to_dict(platform: _platform.Platform) -> dict[str, Any]:
  """Returns a platform as a dict of plain values, with rates in bytes/s.

  Args:
    platform: any platform.

  Returns:
    A dict of strings, numbers, lists and dicts that `json.dumps` accepts.

  Raises:
    TypeError: `platform` is not a `Platform`.

  Example:
    >>> from jaxmotion.perfmodel import builtin_platform
    >>> plain = platform_to_dict(builtin_platform("ethernet_10gbit"))
    >>> plain["axes"][0]["link"]["rate"]
    {'bytes_per_s': 1250000000.0}
    >>> platform_from_dict(plain) == builtin_platform("ethernet_10gbit")
    True
  """
  plain: dict[str, Any] = _to_plain(platform)
  return plain


def platform_from_dict(plain: Mapping[str, Any]) -> _platform.Platform:
  """Returns the platform that a dict describes.

  Args:
    plain: a dict as `platform_to_dict` returns it. Every figure without a
      default must be there.

  Returns:
    The platform.

  Raises:
    TypeError: a field has another type.
    ValueError: a field is missing, unknown or out of range; the message has
      its path.

  Example:
    >>> platform_from_dict({"name": "mine"})
    Traceback (most recent call last):
    ...
    ValueError: `plain` must have a field 'device', got only 'name'.
  """
  return _read_part(_platform.Platform, "plain", plain)


@core.declare(path=core.instance((str, os.PathLike), "a path"))
def save_platform(
  platform: _platform.Platform, path: str | os.PathLike[str]
) -> None:
  """Writes a platform to a JSON file.

  Args:
    platform: any platform.
    path: path of the file, which is overwritten.

  Raises:
    OSError: the file cannot be written.
    TypeError: `platform` is not a `Platform`, or `path` not a path.

  Example:
    >>> import tempfile
    >>> from jaxmotion.perfmodel import builtin_platform
    >>> with tempfile.TemporaryDirectory() as folder:
    ...   save_platform(builtin_platform("h100_node"), f"{folder}/h100.json")
    ...   load_platform(f"{folder}/h100.json").device.name
    'H100 SXM 80 GB'
  """
  text = json.dumps(platform_to_dict(platform), indent=2)
  pathlib.Path(path).write_text(text + "\n")


@core.declare(path=core.instance((str, os.PathLike), "a path"))
def load_platform(path: str | os.PathLike[str]) -> _platform.Platform:
  """Reads a platform from a JSON file.

  Args:
    path: path of a file that `save_platform`, a calibration or a person wrote.

  Returns:
    The platform.

  Raises:
    OSError: the file cannot be read.
    TypeError: a field has another type; the message has the file and the field.
    ValueError: the file is not JSON, or a field is missing, unknown, twice
      there or out of range; the message has the file and the field.

  Example:
    >>> load_platform("cluster.json").name  # doctest: +SKIP
    'our cluster'
  """
  content = pathlib.Path(path).read_bytes()
  try:
    return _read_part(_platform.Platform, "platform", _parse_json(content))
  except (TypeError, ValueError) as error:
    kind = TypeError if isinstance(error, TypeError) else ValueError
    raise kind(
      f"`path` must be the JSON file of a platform, got {str(path)!r}: {error}"
    ) from error


def _parse_json(content: bytes) -> Any:
  """Parses the text of a file; raises for what a platform cannot hold."""

  def make_int(digits: str) -> int:
    # Figures are multiplied by floats, which no larger integer can be.
    if len(digits) > 300:
      raise ValueError(f"numbers must be below 1e300, got {digits[:8]}...")
    return int(digits)

  def make_dict(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    # Python would keep the last of two fields of one name.
    fields: dict[str, Any] = {}
    for name, value in pairs:
      if name in fields:
        raise ValueError(f"the field {name!r} is there twice.")
      fields[name] = value
    return fields

  try:
    return json.loads(
      content.decode(), object_pairs_hook=make_dict, parse_int=make_int
    )
  except RecursionError:
    raise ValueError("it is nested too deeply.") from None


def _to_plain(value: Any) -> Any:
  """Returns a part of a platform as dicts, lists, strings and numbers."""
  if dataclasses.is_dataclass(value):
    fields = dataclasses.fields(value)
    return {f.name: _to_plain(getattr(value, f.name)) for f in fields}
  if isinstance(value, Mapping):
    return {key: _to_plain(v) for key, v in value.items()}
  return [_to_plain(v) for v in value] if isinstance(value, tuple) else value


def _read_part(kind: type[T], path: str, plain: Any) -> T:
  """Returns a platform, or a part of one, that a dict describes."""
  fields = _checked_fields(kind, path, plain)
  for name, value in fields.items():
    # Messages name a part by its place in the platform.
    place = name if kind is _platform.Platform else f"{path}.{name}"
    if name == "axes":
      read_axis = functools.partial(_read_part, _platform.Axis)
      fields[name] = core.sequence("axes", read_axis)(place, value)
    elif name == "measured":
      read_curve = functools.partial(_read_part, _figures.Curve)
      fields[name] = core.mapping("names to curves", read_curve)(place, value)
    elif name.endswith("_host") and value is None:
      continue  # A device may have no link to a host.
    elif name in _PARTS:
      fields[name] = _read_part(_PARTS[name], place, value)
  try:
    return kind(**fields)
  except (TypeError, ValueError) as error:
    raise type(error)(f"`{path}` is not valid: {error}") from error


def _checked_fields(kind: type, path: str, plain: Any) -> dict[str, Any]:
  """Returns a dataclass's fields; raises if one is missing or unknown."""
  fields = dataclasses.fields(kind)
  names = [f.name for f in fields]
  if not isinstance(plain, Mapping):
    raise TypeError(f"`{path}` must be a dict of {names}, got {plain!r}.")
  for name in plain:
    if name not in names:
      raise ValueError(f"`{path}` must have fields of {names}, got {name!r}.")
  for f in fields:
    is_needed = (f.default, f.default_factory) == (dataclasses.MISSING,) * 2
    if is_needed and f.name not in plain:
      names_given = ", ".join(map(repr, plain))
      got = f"only {names_given}" if plain else "no field at all"
      raise ValueError(f"`{path}` must have a field {f.name!r}, got {got}.")
  return dict(plain)
