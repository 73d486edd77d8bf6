"""Emulated links between a host and its device.

A transfer takes latency + bytes / bandwidth. Bandwidths are those of the
standard in one direction after line coding, before the headers of packets: no
real link is faster, so the gain of a codec is not overstated. The latency is an
assumption, not a measurement.
"""

from typing import NamedTuple

_LATENCY_S = 10e-6


class HostLink(NamedTuple):
  """A link whose two directions do not slow each other down.

  Attributes:
    latency_s: seconds of every transfer, assumed.
    bandwidth: bytes per second in each direction.
    source: document that the bandwidth is from.
  """

  latency_s: float
  bandwidth: float
  source: str

  def emulate_ms(self, moved_bytes: float, transfers: float) -> float:
    """Returns emulated milliseconds of transfers in one direction.

    Args:
      moved_bytes: bytes of all transfers.
      transfers: number of transfers.

    >>> HostLink(1e-3, 1e9, "an example").emulate_ms(5_000_000, 2)
    7.0
    """
    seconds = transfers * self.latency_s + moved_bytes / self.bandwidth
    return 1e3 * seconds


def _pcie_link(gigatransfers: float, lanes: int, generation: str) -> HostLink:
  bandwidth = gigatransfers * 1e9 * lanes * 128 / 130 / 8
  return HostLink(
    _LATENCY_S,
    bandwidth,
    f"PCI Express Base Specification {generation}: {gigatransfers:g} GT/s a"
    f" lane, 128b/130b, {lanes} lanes",
  )


HOST_LINKS = {
  "pcie3_x8": _pcie_link(8.0, 8, "3.0"),
  "pcie5_x16": _pcie_link(32.0, 16, "5.0"),
  "nvlink2_x3": HostLink(
    _LATENCY_S,
    3 * 25e9,
    "IBM Power System AC922, Redpaper REDP-5472: 3 NVLink 2.0 bricks of 25 GB/s"
    " between a POWER9 and each of 4 GPUs",
  ),
}
"""Links by name: 7.88, 63.0 and 75 GB/s each way."""


def emulated_unit(unit: str, link: str) -> str:
  """Returns the unit that rows give to a figure emulated for a link."""
  return f"{unit} (emulated {link})"
