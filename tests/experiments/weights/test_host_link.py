import pytest

from experiments.weights import host_link

MIB256 = 256 * 2**20


def test_a_transfer_is_a_latency_and_bytes_over_bandwidth():
  link = host_link.HostLink(latency_s=1e-3, bandwidth=1e9, source="")
  assert link.emulate_ms(0, 0) == 0
  assert link.emulate_ms(0, 3) == pytest.approx(3)
  assert link.emulate_ms(2_000_000, 1) == pytest.approx(1 + 2)


@pytest.mark.parametrize(
  ("name", "gigabytes"),
  # By hand: GT/s a lane x lanes x 128/130 / 8 bits; 3 bricks of 25 GB/s.
  [("pcie3_x8", 7.877), ("pcie5_x16", 63.015), ("nvlink2_x3", 75.0)],
)
def test_links_have_the_bandwidth_of_their_standards(name, gigabytes):
  link = host_link.HOST_LINKS[name]
  assert link.bandwidth / 1e9 == pytest.approx(gigabytes, abs=1e-3)
  assert link.source
  expected_ms = MIB256 / (gigabytes * 1e6) + 0.01
  assert link.emulate_ms(MIB256, 1) == pytest.approx(expected_ms, rel=1e-3)


def test_the_emulated_pcie3_is_no_slower_than_the_papers():
  # 129.6 million floats took 153.93 ms down and 68.51 ms up.
  link = host_link.HOST_LINKS["pcie3_x8"]
  assert link.emulate_ms(4 * 129_589_833, 22) < 68.51


def test_units_name_the_emulated_link():
  assert host_link.emulated_unit("ms", "pcie3_x8") == "ms (emulated pcie3_x8)"
