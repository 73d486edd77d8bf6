"""What the layers of a function, its loops, take for themselves."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core

from jaxmotion.core import Array, tree_bytes
from jaxmotion.perfmodel import Device, predict_cost, predict_seconds

_CALLS = ("jit", "pjit", "closed_call", "core_call")
_PREFIX = re.compile(r"[a-z]+/((?:scan_\d+/)*)")


class Layer(NamedTuple):
  """The body of a loop, or what is in none.

  Attributes:
    prefix: of the names of its residuals.
    forward_s: seconds of all its steps, without loops in it.
    working_bytes: of one step and its backward pass, besides arguments and
      results.
  """

  prefix: str
  forward_s: float
  working_bytes: int


def prefix_of(name: str) -> str:
  """Returns the prefix of a residual's name, "" outside loops.

  >>> prefix_of("dense/scan_0/tanh_0"), prefix_of("mask/gt_0")
  ('scan_0/', '')
  """
  match = _PREFIX.match(name)
  return match.group(1) if match else ""


def within(prefix: str) -> str:
  """Returns a pattern of the names of a layer's residuals."""
  return rf"^[a-z]+/{prefix}(?!scan_\d+/)"


def layers_of(
  fn: Callable[..., Any], args: Sequence[Any], device: Device
) -> list[Layer]:
  """Returns the layers of a function, what is in no loop first."""
  closed = jax.make_jaxpr(fn)(*args)
  return _layers(closed, "", 1, device)


def _layers(
  closed: core.ClosedJaxpr, prefix: str, repeats: int, device: Device
) -> list[Layer]:
  inner = []
  within_s = 0.0
  for i, eqn in enumerate(_scans(closed.jaxpr)):
    body, length = eqn.params["jaxpr"], repeats * eqn.params["length"]
    inner += _layers(body, f"{prefix}scan_{i}/", length, device)
    within_s += length * _seconds(body, device)
  own_s = repeats * _seconds(closed, device) - within_s
  working = _working_bytes(closed) if prefix else 0
  return [Layer(prefix, max(own_s, 0.0), working), *inner]


def _scans(jaxpr: core.Jaxpr) -> Iterator[core.JaxprEqn]:
  for eqn in jaxpr.eqns:
    if eqn.primitive.name == "scan":
      yield eqn
    elif eqn.primitive.name in _CALLS:
      for called in core.jaxprs_in_params(eqn.params):
        yield from _scans(called)


def _seconds(closed: core.ClosedJaxpr, device: Device) -> float:
  run = core.jaxpr_as_fun(closed)
  return predict_seconds(
    predict_cost(run, *_likes(closed.in_avals), while_trips=1), device
  )


def _likes(avals: Sequence[Any]) -> list[jax.ShapeDtypeStruct]:
  return [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in avals]


def _working_bytes(closed: core.ClosedJaxpr) -> int:
  """Of one step, forward and backward."""
  run = core.jaxpr_as_fun(closed)
  likes = _likes(closed.in_avals)
  smooth = [jnp.issubdtype(a.dtype, jnp.inexact) for a in likes]

  def both(*args: Array) -> Any:
    def of(*moving: Array) -> Any:
      given = iter(moving)
      pairs = zip(args, smooth, strict=True)
      return run(*(next(given) if s else a for a, s in pairs))

    outs, pull = jax.vjp(
      of, *(a for a, s in zip(args, smooth, strict=True) if s)
    )
    return pull(list(map(_cotangent, outs)))

  whole = predict_cost(both, *likes, while_trips=1)
  outs = jax.eval_shape(both, *likes)
  return max(0, whole.peak_bytes - tree_bytes(likes) - tree_bytes(outs))


def _cotangent(out: Any) -> Any:
  if jnp.issubdtype(out.dtype, jnp.inexact):
    return jnp.ones_like(out)
  return np.zeros(out.shape, jax.dtypes.float0)
