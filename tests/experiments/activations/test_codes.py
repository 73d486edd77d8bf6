import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.activations import codes


def run_lengths(values):
  """Returns the pairs and the words of a run-length code, one by one."""
  out, i = [], 0
  while i < len(values):
    counts = []
    for zero in (True, False):
      start = i
      while i < len(values) and (values[i] == 0) == zero and i - start < 255:
        i += 1
      counts.append(i - start)
    out += [counts, values[i - counts[1] : i]]
  return out


def expand_runs(parts):
  pieces = []
  for (zeros, _), words in zip(parts[::2], parts[1::2], strict=True):
    pieces += [np.zeros(zeros, np.uint32), words]
  return np.concatenate(pieces)


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
  parts = run_lengths(values)
  assert values.size == 0 or (expand_runs(parts) == values).all()
  written = sum(2 + words.nbytes for words in parts[1::2])
  assert codes.run_length_bytes(values) == written


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_zero_value_coding_takes_a_bit_for_each_and_the_words(dtype):
  x = np.maximum(np.random.default_rng(0).standard_normal((64, 100)), 0)
  x = x.astype(jnp.dtype(dtype))
  values = codes.to_words(x)
  sparsity = (values == 0).mean()
  ratio = x.nbytes / codes.zero_value_bytes(values)
  assert ratio == pytest.approx(1 / (1 - sparsity + 1 / (8 * x.itemsize)))
  # 32 words of zeros are one mask; none makes it a mask longer.
  assert codes.zero_value_bytes(np.zeros(32, np.uint32)) == 4
  assert codes.zero_value_bytes(np.ones(32, np.uint32)) == 4 + 32 * 4


def test_negative_zero_is_not_left_out():
  assert codes.zero_value_bytes(codes.to_words(np.float32([-0.0, 0.0]))) == 8


def test_an_entropy_coder_takes_fewer_bytes_than_the_words():
  x = np.maximum(np.random.default_rng(0).standard_normal((64, 100)), 0)
  values = codes.to_words(x.astype(np.float32))
  assert codes.entropy_bytes(values) < codes.zero_value_bytes(values)


@pytest.mark.parametrize("shape", [(8, 5, 5, 16), (2, 24), (3, 4, 4, 7)])
def test_spread_tiles_come_back_as_they_were(shape):
  x = jax.random.normal(jax.random.key(0), shape)
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
