import pytest

from experiments.common.tables import index_rows
from experiments.planner import links
from experiments.planner.tables import links_table


@pytest.fixture(scope="module")
def rows():
  return links.predict_network(
    "gpt", 1, 0.5, layers=2, width=0.25, length=32, heads=4
  )


def test_a_plan_is_never_slower_than_no_compression(rows):
  steps = [row for row in rows if row.metric == "step_ms_predicted"]
  assert len(steps) == len(links.LINKS)
  assert all(row.value <= row.baseline for row in steps)


def test_the_slower_the_link_the_more_the_plan_gains(rows):
  ratios = [row.ratio for row in rows if row.metric == "step_ms_predicted"]
  assert ratios[0] < 0.7 < ratios[-1]
  assert sorted(ratios[1:]) == ratios[1:]


def test_a_step_without_exchange_is_the_same_on_all_links(rows):
  times = {row.value for row in rows if row.metric == "compute_ms_predicted"}
  assert max(times) == pytest.approx(min(times))


def test_a_slower_device_takes_longer(rows):
  slow = links.make_platform(links.LINKS["NVLink"], 0.1).device
  fast = links.make_platform(links.LINKS["NVLink"], 0.5).device
  for dtype, rate in fast.matmul_flops_per_s.items():
    assert slow.matmul_flops_per_s[dtype] == pytest.approx(rate / 5)


def test_the_table_has_a_line_for_each_link(rows):
  lines = links_table(rows).lines
  assert [line[1] for line in lines] == list(links.LINKS)
  plans = index_rows(rows)
  assert lines[0][-1] == plans[rows[0].case, "plan"].value
