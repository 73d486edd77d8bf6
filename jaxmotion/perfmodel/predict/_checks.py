"""Checks of what several predictions take: platforms, costs, axes, codecs."""

from __future__ import annotations

from typing import Any

from jaxmotion import codecs, core, wire
from jaxmotion.codecs.extend import check_codec
from jaxmotion.perfmodel import cost
from jaxmotion.perfmodel.platform import Axis, Device, Platform, find_axis


def check_cost(name: str, value: Any) -> None:
  """Raises unless `value` is a cost.

  >>> check_cost("cost", 3)
  Traceback (most recent call last):
  ...
  TypeError: `cost` must be a Cost, as `predict_cost` returns it, got 3.
  """
  core.check_instance(
    name, value, cost.Cost, "a Cost, as `predict_cost` returns it"
  )


def check_device(name: str, value: Any) -> None:
  """Raises unless `value` is a device."""
  core.check_instance(
    name, value, Device, "a Device, such as `platform.device`"
  )


def check_platform(value: Any) -> None:
  """Raises unless `value` is a platform."""
  noun = "a Platform, from `builtin_platform` or `load_platform`"
  core.check_instance("platform", value, Platform, noun)


def check_ledger(value: Any) -> None:
  """Raises unless `value` is a ledger."""
  core.check_instance(
    "ledger", value, wire.Ledger, "a Ledger of jaxmotion.wire"
  )


def check_axis(name: str, value: Any) -> None:
  """Raises unless `value` is an axis of a platform."""
  core.check_instance(
    name, value, Axis, 'an Axis, such as `platform.axis("data")`'
  )


def check_codec_given(name: str, value: codecs.Codec | None) -> None:
  """Raises unless `value` is None or a codec, of arrays or of a tree."""
  if value is not None:
    check_codec(name, value, trees=True)


def check_gradients(tree: Any) -> None:
  """Raises unless every leaf of `tree` is a floating-point array or shape."""
  core.check_arrays("tree", tree, numbers=False)
  for path, leaf in core.named_leaves(tree):
    core.check_float(f"tree/{path}" if path else "tree", leaf)


def named_axes(
  platform: Platform, mesh_axis: str | core.HostAxes
) -> tuple[Axis, Axis | None]:
  """Returns the axes of hosts and their devices, or of workers and None."""
  hosts, devices = core.split_axes(mesh_axis)
  return (
    named_axis(platform, "mesh_axis", hosts),
    named_axis(platform, "mesh_axis", devices) if devices else None,
  )


def named_axis(platform: Platform, argument: str, name: Any) -> Axis:
  """Returns an axis of a checked platform, or raises."""
  core.check_text(argument, name)
  return find_axis(platform, argument, name)
