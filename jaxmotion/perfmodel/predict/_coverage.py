"""What a prediction rests on that was never measured."""

from __future__ import annotations

from collections.abc import Iterable

from jaxmotion.perfmodel.cost import Cost
from jaxmotion.perfmodel.platform import Platform
from jaxmotion.perfmodel.predict._roofline import kernel_curve
from jaxmotion.wire import Ledger


def uncalibrated(
  platform: Platform, cost: Cost | None = None, ledger: Ledger | None = None
) -> dict[str, tuple[float, float]]:
  """Lists the kernels and collectives that no measurement covers.

  They are predicted from the figures of the device and the links, or from the
  nearest measured size.

  Args:
    platform: with or without measurements.
    cost: whose kernels run on the device.
    ledger: whose moves go over the links.

  Returns:
    For each kind, the smallest and the largest size that is not covered.

  Example:
    >>> import jax
    >>> from jaxmotion.perfmodel import predict_cost, builtin_platform
    >>> x = jax.ShapeDtypeStruct((64, 64), "float32")
    >>> node = builtin_platform("h100_node")
    >>> uncalibrated(node, predict_cost(lambda x: x @ x + 1, x))
    {'matmul float32': (524288.0, 524288.0), 'elementwise': (32768.0, 32768.0)}
  """
  found: dict[str, tuple[float, float]] = {}
  for name, size, covered in _uses(platform, cost, ledger):
    if not covered:
      low, high = found.get(name, (size, size))
      found[name] = min(low, size), max(high, size)
  return found


def _uses(
  platform: Platform, cost: Cost | None, ledger: Ledger | None
) -> Iterable[tuple[str, float, bool]]:
  for kernel in cost.kernels if cost else ():
    name, size = kernel_curve(kernel)
    curve = platform.device.measured.get(name)
    yield name, size, curve is not None and curve.covers(size)
  for move in ledger.moves if ledger else ():
    name, size = f"{move.op} {move.workers}", float(move.payload_bytes)
    links = [platform.axis(axis).link for axis in move.axes]
    curves = [link.measured.get(name) for link in links]
    yield name, size, all(c is not None and c.covers(size) for c in curves)
