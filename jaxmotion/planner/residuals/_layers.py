"""Layers of a function, its scans, and the seconds of their forward pass."""

from __future__ import annotations

import re
from typing import NamedTuple

import jax

from jaxmotion import core, perfmodel, program

_PREFIX = re.compile(r"[a-z]+/((?:scan_\d+/)*)")


class Layer(NamedTuple):
  """The body of a scan, or everything outside scans.

  Attributes:
    prefix: start of the names of the layer's residuals ("scan_0/"), without
      their kind; "" outside scans.
    forward_s: seconds of all iterations, without inner scans.
  """

  prefix: str
  forward_s: float


def layer_of(name: str) -> str:
  """Returns the prefix of a residual's layer, "" outside scans.

  >>> layer_of("dense/scan_0/tanh_0"), layer_of("mask/gt_0")
  ('scan_0/', '')
  """
  match = _PREFIX.match(name)
  return match.group(1) if match else ""


def list_layers(
  closed: core.jax_core.ClosedJaxpr, device: perfmodel.Device
) -> list[Layer]:
  """Returns the layers of a function; the first is what is outside scans."""
  return _list_layers(closed, "", 1, device)


def _list_layers(
  closed: core.jax_core.ClosedJaxpr,
  prefix: str,
  repeats: int,
  device: perfmodel.Device,
) -> list[Layer]:
  inner_layers = []
  inner_s = 0.0
  scans = [
    step for step in program.flatten(closed).steps if step.name == "scan"
  ]
  for i, scan in enumerate(scans):
    body, length = scan.params["jaxpr"], repeats * scan.params["length"]
    inner_layers += _list_layers(body, f"{prefix}scan_{i}/", length, device)
    inner_s += length * _forward_seconds(body, device)
  own_s = repeats * _forward_seconds(closed, device) - inner_s
  return [Layer(prefix, max(own_s, 0.0)), *inner_layers]


def _forward_seconds(
  closed: core.jax_core.ClosedJaxpr, device: perfmodel.Device
) -> float:
  run = core.jax_core.jaxpr_as_fun(closed)
  cost = perfmodel.predict_cost(run, *_abstract_inputs(closed), while_trips=1)
  return perfmodel.predict_seconds(cost, device)


def _abstract_inputs(
  closed: core.jax_core.ClosedJaxpr,
) -> list[jax.ShapeDtypeStruct]:
  return [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in closed.in_avals]
