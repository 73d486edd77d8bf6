import pytest

from experiments.perfmodel import scaling, sweep
from experiments.perfmodel.sweep import AXES, STRATEGIES, predict_point

NETWORK = "alexnet"


@pytest.fixture(scope="module")
def points():
  return [
    point
    for axis, value in (("link", 0.1), ("link", 400.0))
    for point in predict_point(NETWORK, axis, value, 4, 8)
  ]


def test_each_axis_changes_its_own_figure():
  base = sweep.platform_at("batch", 64, 8)
  device, link = base.device, base.axis("data").link
  faster = sweep.platform_at("flops", 1e15, 8)
  assert faster.device.matmul_flops_per_s["float32"] == 1e15
  assert faster.device.memory_rate == device.memory_rate
  wider = sweep.platform_at("memory", 3.2e12, 8)
  assert wider.device.memory_rate.bytes_per_s == pytest.approx(3.2e12)
  assert wider.axes == base.axes
  linked = sweep.platform_at("link", 400.0, 8)
  assert linked.axis("data").link.rate.bytes_per_s == pytest.approx(50e9)
  assert linked.device == device
  many = sweep.platform_at("workers", 65536, 8)
  assert many.axis("data").workers == 65536
  assert many.axis("data").link == link


def test_a_slow_link_asks_for_compression_and_a_fast_one_less(points):
  seconds = {(p.value, p.strategy): p.step.total_s for p in points}
  gain = [seconds[v, "data"] / seconds[v, "data sign"] for v in (0.1, 400.0)]
  assert gain[0] > 5 > gain[1]
  best = sweep.find_winners(points)
  for value in (0.1, 400.0):
    own = {s: t for (v, s), t in seconds.items() if v == value}
    assert best[NETWORK, "link", value].strategy == min(own, key=own.get)


def test_more_nodes_than_images_cannot_split_the_batch():
  found = {p.strategy for p in predict_point(NETWORK, "batch", 4, 8, 64)}
  assert found == {name for name in STRATEGIES if name.startswith("model")}

  # The largest cluster has an image a node.
  most = max(AXES["workers"])
  found = {p.strategy for p in predict_point(NETWORK, "workers", most, 8, 64)}
  assert "data" in found


def test_crossings_say_from_where():
  step = predict_point(NETWORK, "link", 1.0, 2, 2)[0].step

  def at(value, strategy, seconds):
    slower = type(step)(**(vars(step) | {"total_s": seconds}))
    return sweep.Point(NETWORK, "link", value, strategy, slower)

  values = [(1.0, 1, 2), (10.0, 1, 2), (100.0, 2, 1)]
  own = [
    point
    for value, data, model in values
    for point in (at(value, "data", data), at(value, "model", model))
  ]
  found = sweep.find_crossings(own)
  assert found == {(NETWORK, "link"): "data from 1, model from 100"}


def test_the_runner_writes_what_it_predicts(monkeypatch, run_main):
  monkeypatch.setitem(AXES, "link", (1.0,))
  small = {"axes": ["link"], "study_workers": 2, "study_batch": 2}
  rows, _ = run_main(scaling.main, plot=True, networks=[NETWORK], **small)
  assert {row.experiment for row in rows} == {"perfmodel_scaling_alexnet"}
  assert len(rows) == len(STRATEGIES)
  (data,) = [row.value for row in rows if row.case.startswith("data link=")]
  for row in rows:
    assert row.baseline == data
    assert row.ratio == pytest.approx(row.value / data)
