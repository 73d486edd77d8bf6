import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments import models
from experiments.activations import codes, measure, offload
from experiments.activations.codes import CODES, OURS, PUBLISHED_CODE
from experiments.activations.measure import Snapshot


def run_lengths(values):
  """Returns the pairs of a run-length code, each with the words it counts."""
  out, i = [], 0
  while i < len(values):
    counts = []
    for zero in (True, False):
      start = i
      while i < len(values) and (values[i] == 0) == zero and i - start < 255:
        i += 1
      counts.append(i - start)
    out.append((counts, values[i - counts[1] : i]))
  return out


@pytest.mark.parametrize(
  "values",
  [
    np.zeros(1000),
    np.ones(1000),
    np.ones(255),
    np.concatenate([np.ones(3), np.zeros(510), np.ones(511), np.zeros(1)]),
    np.maximum(np.random.default_rng(0).standard_normal(5000), 0),
    np.zeros(0),
  ],
  ids=["zeros", "ones", "one byte", "long", "relu", "none"],
)
def test_run_lengths_are_counted_as_a_coder_writes_them(values):
  values = codes.to_words(values.astype(np.float32))
  written = sum(2 + words.nbytes for _, words in run_lengths(values))
  assert codes.run_length_bytes(values) == written


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_zero_value_coding_takes_a_bit_for_each_and_the_words(dtype):
  x = np.maximum(np.random.default_rng(0).standard_normal((64, 100)), 0)
  x = x.astype(jnp.dtype(dtype))
  values = codes.to_words(x)
  sparsity = (values == 0).mean()
  ratio = x.nbytes / codes.zero_value_bytes(values)
  assert ratio == pytest.approx(1 / (1 - sparsity + 1 / (8 * x.itemsize)))
  # An entropy coder takes fewer bytes than the words.
  assert codes.entropy_bytes(values) < codes.zero_value_bytes(values)
  # 32 words of zeros are one mask; none makes it a mask longer.
  assert codes.zero_value_bytes(np.zeros(32, np.uint32)) == 4
  assert codes.zero_value_bytes(np.ones(32, np.uint32)) == 4 + 32 * 4
  # Negative zero is not left out.
  assert codes.zero_value_bytes(codes.to_words(np.float32([-0.0, 0.0]))) == 8


def test_spread_tiles_come_back_as_they_were():
  x = jax.random.normal(jax.random.key(0), (3, 4, 4, 7))
  tiles = codes.spread_tiles(x)
  assert tiles.shape[1] == codes.TILE
  same = codes.to_words(np.asarray(tiles)).reshape(tiles.shape)
  np.testing.assert_array_equal(same, codes.cut_tiles(np.asarray(x), "spread"))
  np.testing.assert_array_equal(codes.gather_tiles(tiles, x), x)


def test_spread_tiles_need_less_room_where_zeros_are_together():
  random = np.random.default_rng(0)
  x = np.maximum(random.standard_normal((64, 8, 8, 32), "float32"), 0)
  x[::2] = 0
  x[..., ::2] = 0
  near, far = (codes.cut_tiles(x, layout) for layout in ("nhwc", "spread"))
  assert codes.calibrate_room(near, 0.0) > 1.5 * codes.calibrate_room(far, 0.0)
  mean = np.count_nonzero(x) / len(far)
  assert codes.calibrate_room(far, 0.0) < 1.4 * mean


def test_room_is_that_of_the_fullest_tile_and_a_margin():
  x = np.zeros((2, codes.TILE), np.float32)
  x[1, :100] = 1
  assert codes.calibrate_room(x, 0.0) == 100
  assert codes.calibrate_room(x, 0.05) == 105
  assert codes.calibrate_room(np.ones_like(x), 0.05) == codes.TILE
  assert codes.calibrate_room(np.zeros_like(x), 0.05) == 1
  assert [codes.count_overflows(x, n) for n in (99, 100)] == [1, 0]


def sparse(seed, share=0.3):
  random = np.random.default_rng(seed)
  x = np.abs(random.standard_normal((4, 16, 16, 24), "float32"))
  return np.where(random.random(x.shape) < share, x, np.float32(0))


def test_a_layer_is_measured_under_every_code():
  layer = measure.measure_layer("conv1", sparse(0), sparse(1))
  assert set(layer.code_bytes) == set(CODES)
  assert layer.sparsity == pytest.approx(0.7, abs=0.02)
  # A word in three and a bit for each.
  expected = 1 / (1 - layer.sparsity + 1 / 32)
  assert layer.ratio(PUBLISHED_CODE) == pytest.approx(expected, rel=1e-4)
  assert layer.overflows == 0
  assert 1.5 * layer.ratio(PUBLISHED_CODE) < layer.ratio(OURS)
  assert layer.ratio(OURS) < layer.ratio("zvc16") < 2 * expected
  assert 0 < layer.bf16_error < 2**-8
  # An array that overflows counts twice.
  layer = measure.measure_layer("conv1", sparse(0, 0.1), sparse(1, 0.3))
  assert layer.overflows == layer.tiles
  assert layer.ratio("zero_value") < 1
  assert layer.code_bytes["zero_value"] > 4 * layer.elements
  # Dense arrays stay uncompressed.
  layer = measure.measure_layer("conv1", sparse(0, 1.0), sparse(1, 1.0))
  assert layer.ratio("zero_value") == 1
  assert layer.ratio(OURS) == 2


def test_layers_weigh_as_much_as_their_elements():
  layers = [
    measure.measure_layer(name, x, x)
    for name, x in {"a": sparse(0, 1.0), "b": sparse(1, 0.1)[:1]}.items()
  ]
  net = measure.Measured("net", 0, 0.0, 0.0, layers)
  assert net.sparsity == pytest.approx(0.2 * 0.9, abs=0.01)
  a, b = (layer.ratio(PUBLISHED_CODE) for layer in layers)
  assert net.ratio(PUBLISHED_CODE) == pytest.approx(5 / (4 / a + 1 / b))


def test_the_largest_activation_is_really_encoded():
  small, large = sparse(0)[:1], sparse(1)
  seen = {"small": small, "large": large}
  name, payload_bytes = measure.check_largest(Snapshot(0, 0.0, 0.0, seen, seen))
  assert name == "large"
  layer = measure.measure_layer("large", large, large)
  assert payload_bytes == layer.code_bytes[OURS]


def test_a_layer_takes_the_longer_of_computing_and_moving():
  stage = offload.Stage("a", 1.0, 2.0, {"a/relu": 1000})
  fast = offload.PLATFORMS["h200"]
  assert offload.predict_step([stage], fast, 1.0) == 3.0
  rate = fast.to_host.rate.bytes_per_s
  slow = stage._replace(moved_bytes={"a/relu": 8 * rate})
  latency = 2 * fast.to_host.latency_s
  moved = offload.predict_step([slow], fast, {"a/relu": 2.0})
  assert moved == pytest.approx(2 * 4.0 + latency)


def test_compression_is_worth_no_more_than_no_transfer_at_all():
  net = models.make_network("alexnet", image=64, width=0.25)
  platform = offload.PLATFORMS["h200"]
  alexnet = offload.predict_stages(net, 16, platform.device)
  times = [offload.predict_step(alexnet, platform, r) for r in (1.0, 2.6, 1e9)]
  assert times[0] > times[1] > times[2] >= offload.sum_compute(alexnet)
  # Every activation is moved once.
  moved = [size for stage in alexnet for size in stage.moved_bytes.values()]
  seen = jax.eval_shape(net.activations, net.params, net.batch(16)[0])
  assert moved == [4 * y.size for y in seen.values()]
  assert [s.name for s in alexnet] == [s.name for s in net.stages]
  assert all(s.forward_s > 0 and s.backward_s > 0 for s in alexnet)
  # Every figure of a platform has a source.
  platform = offload.PLATFORMS["titan_x"]
  assert "device.memory_rate" in platform.sources
  assert "assumed" in platform.sources["to_host.latency_s"]
