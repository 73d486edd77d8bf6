"""Layers of a function, its scans: their seconds and temporary bytes."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend import core

from jaxmotion.core import (
  Array,
  float0_zeros,
  is_inexact,
  tree_bytes,
  vjp_inexact,
)
from jaxmotion.perfmodel import Device, predict_cost, predict_seconds
from jaxmotion.program import flatten

_PREFIX = re.compile(r"[a-z]+/((?:scan_\d+/)*)")


class Layer(NamedTuple):
  """The body of a scan, or everything outside scans.

  Attributes:
    prefix: start of the names of the layer's residuals ("scan_0/"), without
      their kind; "" outside scans.
    forward_s: seconds of all iterations, without inner scans.
    temporary_bytes: bytes alive in one iteration and its backward pass, without
      arguments and results.
  """

  prefix: str
  forward_s: float
  temporary_bytes: int


def layer_of(name: str) -> str:
  """Returns the prefix of a residual's layer, "" outside scans.

  >>> layer_of("dense/scan_0/tanh_0"), layer_of("mask/gt_0")
  ('scan_0/', '')
  """
  match = _PREFIX.match(name)
  return match.group(1) if match else ""


def layer_pattern(prefix: str) -> str:
  """Returns a pattern that matches the names of a layer's residuals."""
  return rf"^[a-z]+/{prefix}(?!scan_\d+/)"


def list_layers(
  fn: Callable[..., Any], args: Sequence[Any], device: Device
) -> list[Layer]:
  """Returns the layers of a function; the first is what is outside scans."""
  closed = jax.make_jaxpr(fn)(*args)
  return _list_layers(closed, "", 1, device)


def _list_layers(
  closed: core.ClosedJaxpr, prefix: str, repeats: int, device: Device
) -> list[Layer]:
  inner_layers = []
  inner_s = 0.0
  scans = [step for step in flatten(closed).steps if step.name == "scan"]
  for i, scan in enumerate(scans):
    body, length = scan.params["jaxpr"], repeats * scan.params["length"]
    inner_layers += _list_layers(body, f"{prefix}scan_{i}/", length, device)
    inner_s += length * _forward_seconds(body, device)
  own_s = repeats * _forward_seconds(closed, device) - inner_s
  temporary_bytes = _temporary_bytes(closed) if prefix else 0
  return [Layer(prefix, max(own_s, 0.0), temporary_bytes), *inner_layers]


def _forward_seconds(closed: core.ClosedJaxpr, device: Device) -> float:
  run = core.jaxpr_as_fun(closed)
  cost = predict_cost(run, *_abstract_inputs(closed), while_trips=1)
  return predict_seconds(cost, device)


def _abstract_inputs(closed: core.ClosedJaxpr) -> list[jax.ShapeDtypeStruct]:
  return [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in closed.in_avals]


def _temporary_bytes(closed: core.ClosedJaxpr) -> int:
  """Returns the temporary bytes of one iteration, forward and backward."""
  run = core.jaxpr_as_fun(closed)
  inputs = _abstract_inputs(closed)

  def forward_backward(*args: Array) -> Any:
    outs, backward, _ = vjp_inexact(lambda *args: (run(*args), ()), *args)
    return backward(list(map(_unit_cotangent, outs)))

  cost = predict_cost(forward_backward, *inputs, while_trips=1)
  outs = jax.eval_shape(forward_backward, *inputs)
  return max(0, cost.peak_bytes - tree_bytes(inputs) - tree_bytes(outs))


def _unit_cotangent(out: Any) -> Any:
  return jnp.ones_like(out) if is_inexact(out) else float0_zeros(out)
