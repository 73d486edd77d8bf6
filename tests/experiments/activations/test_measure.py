import numpy as np
import pytest

from experiments.activations import measure
from experiments.activations.cases import CODES, OURS, PUBLISHED_CODE
from experiments.activations.sampling import Snapshot


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


def test_an_array_that_overflows_counts_twice():
  layer = measure.measure_layer("conv1", sparse(0, 0.1), sparse(1, 0.3))
  assert layer.overflows == layer.tiles
  assert layer.ratio("zero_value") < 1
  assert layer.code_bytes["zero_value"] > 4 * layer.elements


def test_dense_arrays_stay_uncompressed():
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
