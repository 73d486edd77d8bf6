import jax
import pytest

from experiments import models
from experiments.activations import offload

NET = models.make_network("alexnet", image=64, width=0.25)


@pytest.fixture(scope="module")
def alexnet():
  return offload.predict_stages(NET, 16, offload.PLATFORMS["h200"].device)


def test_a_layer_takes_the_longer_of_computing_and_moving():
  stage = offload.Stage("a", 1.0, 2.0, {"a/relu": 1000})
  fast = offload.PLATFORMS["h200"]
  assert offload.predict_step([stage], fast, 1.0) == 3.0
  rate = fast.to_host.rate.bytes_per_s
  slow = stage._replace(moved_bytes={"a/relu": 8 * rate})
  latency = 2 * fast.to_host.latency_s
  moved = offload.predict_step([slow], fast, {"a/relu": 2.0})
  assert moved == pytest.approx(2 * 4.0 + latency)


def test_compression_is_worth_no_more_than_no_transfer_at_all(alexnet):
  platform = offload.PLATFORMS["h200"]
  times = [offload.predict_step(alexnet, platform, r) for r in (1.0, 2.6, 1e9)]
  assert times[0] > times[1] > times[2] >= offload.sum_compute(alexnet)


def test_every_activation_is_moved_once(alexnet):
  moved = [size for stage in alexnet for size in stage.moved_bytes.values()]
  seen = jax.eval_shape(NET.activations, NET.params, NET.batch(16)[0])
  assert moved == [4 * y.size for y in seen.values()]
  assert [s.name for s in alexnet] == [s.name for s in NET.stages]
  assert all(s.forward_s > 0 and s.backward_s > 0 for s in alexnet)


def test_every_figure_of_a_platform_has_a_source():
  platform = offload.PLATFORMS["titan_x"]
  assert "device.memory_rate" in platform.sources
  assert "assumed" in platform.sources["to_host.latency_s"]
