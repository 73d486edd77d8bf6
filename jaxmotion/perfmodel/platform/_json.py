"""Platforms as JSON files."""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
from collections.abc import Mapping
from typing import Any, TypeVar

from jaxmotion.perfmodel.platform._curve import Curve
from jaxmotion.perfmodel.platform._platform import Axis, Device, Link, Platform
from jaxmotion.perfmodel.platform._units import Rate

_T = TypeVar("_T")


def platform_to_dict(platform: Platform) -> dict[str, Any]:
  """Returns a platform as plain values; rates are numbers of bytes/s.

  Args:
    platform: any platform.

  Example:
    >>> from jaxmotion.perfmodel import builtin_platform
    >>> plain = platform_to_dict(builtin_platform("ethernet_10gbit"))
    >>> plain["axes"][0]["link"]["rate"]
    {'bytes_per_s': 1250000000.0}
    >>> platform_from_dict(plain) == builtin_platform("ethernet_10gbit")
    True
  """
  plain: dict[str, Any] = _plain(platform)
  return plain


def platform_from_dict(plain: Mapping[str, Any]) -> Platform:
  """Returns the platform that a dict describes.

  Args:
    plain: what `platform_to_dict` returned. Every figure must be there.

  Raises:
    ValueError: a field is missing, unknown or wrong; it is named by its path.
    TypeError: a field is of another type.

  Example:
    >>> platform_from_dict({"name": "mine"})
    Traceback (most recent call last):
    ...
    ValueError: `platform` must have a field 'device', got only 'name'.
  """
  fields = _fields(Platform, "platform", plain)
  fields["device"] = _device("device", fields["device"])
  for name in ("to_host", "from_host"):
    fields[name] = _link(name, fields[name])
  fields["axes"] = tuple(
    _axis(f"axes[{i}]", axis) for i, axis in enumerate(fields["axes"])
  )
  return _make(Platform, "platform", fields)


def save_platform(platform: Platform, path: str | os.PathLike[str]) -> None:
  """Writes a platform to a JSON file.

  Args:
    platform: any platform.
    path: the file.

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


def load_platform(path: str | os.PathLike[str]) -> Platform:
  """Reads a platform from a JSON file.

  Args:
    path: what `save_platform` wrote, by hand or by a calibration.

  Raises:
    ValueError: the file is no platform; the field is named by its path.

  Example:
    >>> load_platform("cluster.json").name  # doctest: +SKIP
    'our cluster'
  """
  return platform_from_dict(json.loads(pathlib.Path(path).read_text()))


def _plain(value: Any) -> Any:
  if dataclasses.is_dataclass(value):
    fields = dataclasses.fields(value)
    return {f.name: _plain(getattr(value, f.name)) for f in fields}
  if isinstance(value, Mapping):
    return {key: _plain(v) for key, v in value.items()}
  return [_plain(v) for v in value] if isinstance(value, tuple) else value


def _device(path: str, plain: Any) -> Device:
  fields = _fields(Device, path, plain)
  fields["memory_rate"] = _rate(f"{path}.memory_rate", fields["memory_rate"])
  fields["measured"] = _curves(path, fields)
  return _make(Device, path, fields)


def _axis(path: str, plain: Any) -> Axis:
  fields = _fields(Axis, path, plain)
  fields["link"] = _link(f"{path}.link", fields["link"])
  return _make(Axis, path, fields)


def _link(path: str, plain: Any) -> Link:
  fields = _fields(Link, path, plain)
  fields["rate"] = _rate(f"{path}.rate", fields["rate"])
  fields["measured"] = _curves(path, fields)
  return _make(Link, path, fields)


def _curves(path: str, fields: dict[str, Any]) -> dict[str, Curve]:
  paths = {k: f"{path}.measured[{k!r}]" for k in fields.get("measured", {})}
  return {
    key: _make(Curve, where, _fields(Curve, where, fields["measured"][key]))
    for key, where in paths.items()
  }


def _rate(path: str, plain: Any) -> Rate:
  return _make(Rate, path, _fields(Rate, path, plain))


def _fields(kind: type, path: str, plain: Any) -> dict[str, Any]:
  """The fields of a dataclass; raises where one is missing or unknown."""
  fields = dataclasses.fields(kind)
  names = [f.name for f in fields]
  if not isinstance(plain, Mapping):
    raise TypeError(f"`{path}` must be a dict of {names}, got {plain!r}.")
  for name in plain:
    if name not in names:
      raise ValueError(f"`{path}` must have fields of {names}, got {name!r}.")
  for f in fields:
    needed = (f.default, f.default_factory) == (dataclasses.MISSING,) * 2
    if needed and f.name not in plain:
      given = ", ".join(map(repr, plain)) or "none"
      raise ValueError(
        f"`{path}` must have a field {f.name!r}, got only {given}."
      )
  return dict(plain)


def _make(kind: type[_T], path: str, fields: dict[str, Any]) -> _T:
  try:
    return kind(**fields)
  except (TypeError, ValueError) as error:
    raise type(error)(f"`{path}` is not valid: {error}") from error
