"""Scan whose iterations send their residuals to the host and fetch them."""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxmotion import core
from jaxmotion.core import Array, AxisName, PyTree
from jaxmotion.memory import _memory_kind
from jaxmotion.memory.residuals import choose
from jaxmotion.memory.residuals.run import _backward, _forward

Arrays = list[Array]


class HostBuffers:
  """Lays out one iteration's residuals: a device part and host buffers.

  Encoded buffers that go to the host are concatenated, to one host buffer for
  each dtype. XLA:GPU has at most two transfers under way, so of a dozen per
  iteration it waited for most. A loop carries the host buffers to its next
  iteration: they are sent while that one computes, and fetched while the
  iteration before computes. The cost is the memory of one more iteration's
  buffers.
  """

  def __init__(self, residuals: Sequence[choose.Residual]):
    self._residuals = residuals
    # Elements of each host buffer, by dtype.
    self._sizes: dict[Any, int] = {}
    # Parts that lie on several devices are not joined: that would move them.
    self._apart: list[jax.ShapeDtypeStruct] = []
    for residual in residuals:
      for like in residual.coder.likes if residual.on_host else ():
        if residual.partition is None:
          self._sizes[like.dtype] = self._sizes.get(like.dtype, 0) + like.size
        else:
          self._apart.append(like)

  def __bool__(self) -> bool:
    """Whether any residual goes to the host."""
    return bool(self._sizes or self._apart)

  def zeros(self, varying_like: PyTree) -> list[Array]:
    """Returns host buffers of zeros, which the first iteration carries."""
    # varying_like: arrays; where one varies over a mesh axis, the zeros do.
    zeros = [jnp.zeros(n, dtype) for dtype, n in self._sizes.items()]
    zeros += [
      lax.full(like.shape, 0, like.dtype, sharding=like.sharding)
      for like in self._apart
    ]
    return core.to_varying(zeros, _varying_axes(varying_like))

  def pack(
    self, buffers: Sequence[choose.Buffers], varying_like: PyTree
  ) -> tuple[list[choose.Buffers], list[Array]]:
    """Separates the buffers that stay from those that go to the host."""
    # Returns the buffers of the residuals that stay on the device, and one host
    # buffer for each dtype, flat, then those on several devices. The host
    # buffers are still on the device.
    device: list[choose.Buffers] = []
    host: dict[Any, list[Array]] = {dtype: [] for dtype in self._sizes}
    apart: list[Array] = []
    for residual, own in zip(self._residuals, buffers, strict=True):
      if not residual.on_host:
        device.append(own)
      elif residual.partition is None:
        for a in own:
          host[a.dtype].append(a.reshape(-1))
      else:
        apart += own
    sent = [*(jnp.concatenate(parts) for parts in host.values()), *apart]
    return device, core.to_varying(sent, _varying_axes(varying_like))

  def unpack(self, host: Sequence[Array]) -> list[choose.Buffers]:
    """Returns the buffers of each offloaded residual from the host buffers."""
    apart = iter(host[len(self._sizes) :])
    remaining = dict(zip(self._sizes, host, strict=False))
    fetched: list[choose.Buffers] = []
    for residual in self._residuals:
      if not residual.on_host:
        continue
      own: choose.Buffers = []
      for like in residual.coder.likes:
        if residual.partition is not None:
          own.append(next(apart))
          continue
        flat, remaining[like.dtype] = jnp.split(
          remaining[like.dtype], [like.size]
        )
        own.append(flat.reshape(like.shape))
      fetched.append(own)
    return fetched

  def merge(
    self, device: Sequence[choose.Buffers], fetched: Sequence[choose.Buffers]
  ) -> list[choose.Buffers]:
    """Returns the buffers of all residuals, in their order; inverts `pack`."""
    stayed, came_back = iter(device), iter(fetched)
    return [next(came_back if r.on_host else stayed) for r in self._residuals]


def _varying_axes(tree: PyTree) -> tuple[AxisName, ...]:
  """Returns the mesh axes over which any array of a tree varies."""
  axes = {a for leaf in jax.tree.leaves(tree) for a in core.varying_axes(leaf)}
  return tuple(sorted(axes, key=str))


def run_scan(
  selection: choose.Selection,
  layout: HostBuffers,
  consts: Sequence[Array],
  init: Sequence[Array],
  xs: Sequence[Array],
  **options: Any,
) -> tuple[Arrays, tuple[Arrays, choose.Diagnostics]]:
  """Runs a scan whose iterations send their residuals to the host."""
  # The host buffers of an iteration are carried to the next one, which sends
  # them while it computes. In the backward pass, an iteration fetches the
  # buffers that the next backward iteration needs, again while it computes. The
  # buffers of the last forward iteration never leave the device: the backward
  # pass begins with them.
  # Returns the last carry, the stacked outputs, and stacked diagnostics.
  carried = len(init)
  scan: Any = functools.partial(lax.scan, **options)

  @jax.custom_vjp
  def run(consts: Arrays, init: Arrays, xs: Arrays) -> Any:
    def iteration(carry: Arrays, x: Arrays) -> Any:
      outs, notes = _forward.evaluate_outputs(selection, [*consts, *x, *carry])
      return outs[:carried], (outs[carried:], notes)

    return scan(iteration, init, xs)

  def run_forward(consts: Arrays, init: Arrays, xs: Arrays) -> Any:
    """Runs the loop; returns its results, and what its backward pass reads."""
    operands = consts, init, xs

    def iteration(state: Any, x: Arrays) -> Any:
      """Runs the body, and sends the buffers of the iteration before."""
      carry, previous = state
      inputs = [*consts, *x, *carry]
      (outs, notes), buffers = _forward.forward(
        selection, inputs, transfer=False
      )
      device, host = layout.pack(buffers, operands)
      sent = _memory_kind.to_host(previous)
      return (outs[:carried], host), (outs[carried:], notes, device, sent)

    begin = init, layout.zeros(operands)
    (carry, last), (ys, notes, device, host) = scan(iteration, begin, xs)
    return (carry, (ys, notes)), (consts, xs, last, device, host)

  def run_backward(residuals: Any, cotangents: Any) -> Any:
    """Runs the loop backward; returns gradients of consts, init and xs."""
    consts, xs, last, device, host = residuals
    ct_carry, (ct_ys, _) = cotangents

    def iteration(state: Any, row: Any) -> Any:
      """Runs the body backward, and fetches buffers for the next iteration."""
      ct, const_grads, fetched = state
      x, ct_y, stayed, previous = row
      # Row i of the host stack holds the buffers of the iteration before i,
      # which is the one that runs next: they are for the next iteration.
      previous = _memory_kind.to_device(previous)
      grads = _backward.backward(
        selection,
        [*consts, *x, *([None] * carried)],
        layout.merge(stayed, fetched),
        [*ct, *ct_y],
        transfer=False,
      )
      first, second = len(consts), len(consts) + len(xs)
      pairs = zip(const_grads, _drop_none(grads[:first]), strict=True)
      const_grads = [a + b for a, b in pairs]
      ct = _drop_none(grads[second:])
      # Unpacked at the end of the iteration, after the last use of its own
      # buffers.
      state = ct, const_grads, layout.unpack(previous)
      return state, _drop_none(grads[first:second])

    zeros = [jnp.zeros_like(a) for a in _drop_integers(consts)]
    begin = _drop_integers(ct_carry), zeros, layout.unpack(last)
    rows = xs, _drop_integers(ct_ys), device, host
    is_reverse = not options.get("reverse", False)
    state, x_grads = scan(iteration, begin, rows, reverse=is_reverse)
    ct, const_grads, _ = state
    return (
      _insert_none(const_grads, consts),
      _insert_none(ct, init),
      _insert_none(x_grads, xs),
    )

  run.defvjp(run_forward, run_backward)
  return run(list(consts), list(init), list(xs))


def _drop_integers(arrays: Sequence[Any]) -> list[Any]:
  """Returns the arrays that have gradients."""
  return [a for a in arrays if core.is_inexact(a)]


def _drop_none(gradients: Sequence[Any]) -> list[Any]:
  """Returns the gradients that exist."""
  return [g for g in gradients if g is not None]


def _insert_none(
  gradients: Sequence[Array], like: Sequence[Array]
) -> list[Any]:
  """Returns one gradient for each array, None for arrays that have none."""
  given = iter(gradients)
  return [next(given) if core.is_inexact(a) else None for a in like]
