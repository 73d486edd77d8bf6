"""Lists kernels and collectives that no measurement of a platform covers."""

from __future__ import annotations

from collections.abc import Iterable

from jaxmotion import wire
from jaxmotion.perfmodel.cost import Cost
from jaxmotion.perfmodel.platform import Platform, find_axis
from jaxmotion.perfmodel.predict import _checks, _roofline


def uncalibrated(
  platform: Platform,
  cost: Cost | None = None,
  ledger: wire.Ledger | None = None,
) -> dict[str, tuple[float, float]]:
  """Lists the kernels and collectives that no measurement covers.

  Such kernels and collectives are predicted from the stated rates of the
  device and the links, or extrapolated from the nearest measured size.

  Args:
    platform: a platform with or without measured curves.
    cost: kernels that run on the device.
    ledger: moves that go over the links.

  Returns:
    For each kind of kernel or collective, the smallest and the largest size
    (FLOPs, bytes or payload bytes) that no curve covers.

  Raises:
    TypeError: an argument is of another class.
    ValueError: the platform lacks an axis of the ledger.

  Example:
    >>> import jax
    >>> from jaxmotion.perfmodel import predict_cost, builtin_platform
    >>> x = jax.ShapeDtypeStruct((64, 64), "float32")
    >>> cost = predict_cost(lambda x: x @ x + 1, x)
    >>> uncalibrated(builtin_platform("h100_node"), cost)
    {'matmul float32': (524288.0, 524288.0), 'elementwise': (32768.0, 32768.0)}
  """
  _checks.check_platform(platform)
  if cost is not None:
    _checks.check_cost("cost", cost)
  if ledger is not None:
    _checks.check_ledger(ledger)
  found: dict[str, tuple[float, float]] = {}
  for name, size, is_covered in _curve_lookups(platform, cost, ledger):
    if not is_covered:
      low, high = found.get(name, (size, size))
      found[name] = min(low, size), max(high, size)
  return found


def _curve_lookups(
  platform: Platform, cost: Cost | None, ledger: wire.Ledger | None
) -> Iterable[tuple[str, float, bool]]:
  """Yields the curve, size and coverage of every kernel and move."""
  for kernel in cost.kernels if cost else ():
    name, size = _roofline.kernel_curve(kernel)
    curve = platform.device.measured.get(name)
    yield name, size, curve is not None and curve.covers(size)
  for move in ledger.moves if ledger else ():
    name, size = f"{move.op} {move.workers}", float(move.payload_bytes)
    links = [find_axis(platform, "ledger", axis).link for axis in move.axes]
    curves = [link.measured.get(name) for link in links]
    yield name, size, all(c is not None and c.covers(size) for c in curves)
