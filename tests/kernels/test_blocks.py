import math

import jax
import numpy as np
import pytest

from jaxmotion.core import shape_dtype
from jaxmotion.kernels._block_layout import (
  block_counts,
  block_shape,
  from_blocks,
  max_element,
  max_magnitude,
  min_element,
  nearest_planes,
  reduce_blocks,
  scale_axes,
  sum_magnitudes,
  to_blocks,
)

SHAPES = [
  (),
  (7,),
  (0, 5),
  (3, 1, 5),
  (33,),
  (37, 29),
  (64, 96),
  (1000, 4),
  (2, 2053),
  (4099,),
]
CUTS = [(1, 1), (4, 7), (8, 64), (20, 100), (32, 512), (32, 10_000)]
ALL = pytest.mark.parametrize("shape", SHAPES, ids=str)


def many_shapes():
  rng = np.random.default_rng(0)
  for _ in range(500):
    rank = rng.integers(0, 4)
    yield tuple(int(n) for n in (2 ** rng.uniform(0, 12 / max(rank, 1), rank)))


@pytest.mark.unoptimized
@ALL
def test_every_value_is_in_one_block_once(shape):
  x = np.arange(1.0, math.prod(shape) + 1, dtype=np.float32).reshape(shape)

  @jax.jit
  def trips(x):
    cut = [to_blocks(x, *sizes) for sizes in CUTS]
    return [(b, from_blocks(b, shape_dtype(x))) for b in cut]

  for (planes, block), (b, y) in zip(CUTS, trips(x), strict=True):
    assert b.shape == block_shape(shape, planes, block)
    flat = np.asarray(b).reshape(-1)
    # In order, so that a block is a contiguous run; then its last value.
    np.testing.assert_array_equal(flat[: x.size], x.reshape(-1))
    assert (flat[x.size :] == flat[x.size - 1 : x.size]).all()
    assert y.shape == shape
    np.testing.assert_array_equal(y, x)


def test_blocks_are_no_longer_than_asked_and_hold_little_padding():
  for shape in SHAPES + list(many_shapes()):
    size = math.prod(shape)
    for planes, block in CUTS:
      cut = block_shape(shape, planes, block)
      p, count, width = cut
      assert p == planes and count >= 1 and 0 <= width <= block
      # Less than a value a block, or the stated share.
      waste = math.prod(cut) - size
      assert 0 <= waste <= max(p * count - 1, size // 32)
      filled = (np.arange(math.prod(cut)) < size).reshape(cut)
      counts = filled.sum(scale_axes(size, block), keepdims=True)
      np.testing.assert_array_equal(block_counts(shape, planes, block), counts)


@pytest.mark.parametrize(
  ("shape", "planes", "block"),
  [
    ((64, 96), 8, 512),
    ((64, 96), 8, 96),
    ((64, 96), 8, 64),
    ((16, 4, 768), 32, 512),
    ((1000, 100), 8, 512),
    ((784, 2048), 32, 1024),
    ((256, 3, 3, 128), 4, 300),
  ],
)
def test_blocks_and_planes_follow_the_rows(shape, planes, block):
  _, count, width = block_shape(shape, planes, block)
  minor = shape[-1]
  assert width % minor == 0 or minor % width == 0
  assert count * width % minor == 0
  assert 4 * width >= block


def test_the_nearest_planes_are_close_to_the_target_or_follow_no_row():
  for shape in many_shapes():
    size = math.prod(shape)
    for target in (1, 2.5, 30.3, 1000):
      planes = nearest_planes(shape, target)
      plain = max(1, round(target))
      minor = shape[-1] if len(shape) > 1 else 1
      run = size / planes
      aligned = run and (run % minor == 0 or minor % run == 0)
      assert planes == plain or aligned
      assert planes == plain or max(planes / target, target / planes) <= 1.5


@pytest.mark.parametrize("width", [1024, 1000])
def test_sums_of_large_arrays_are_those_of_magnitudes(width):
  b = np.random.default_rng(0).random((2, 2200, width), np.float32) - 0.5
  np.testing.assert_allclose(
    jax.jit(lambda b: sum_magnitudes(b, (2,)))(b),
    np.abs(b.astype(np.float64)).sum(2, keepdims=True),
    rtol=1e-6,
  )


@pytest.mark.parametrize("width", [1, 31, 32, 33, 63, 481, 4099])
def test_reductions_take_every_value_of_a_block_of_any_width_once(width):
  # Powers of two of which any sum is exact: a value taken twice, or left out,
  # changes the sum.
  b = np.ones((1, 2, width), np.float32)
  b[0, 1] = 2.0 ** (np.arange(width) % 8)
  b[:, :, ::3] *= -1

  @jax.jit
  def reduce(b):
    every = max_magnitude, sum_magnitudes, min_element, max_element
    return [fn(b, (2,)) for fn in every]

  def reduce_with(at, value):
    changed = b.copy()
    changed[0, 0, at] = value
    return reduce(changed)

  np.testing.assert_array_equal(reduce(b)[1], np.abs(b).sum(2, keepdims=True))
  for at in {0, width // 2, width - 1}:
    peak, _, least, _ = reduce_with(at, -1000.0)
    assert peak[0, 0, 0] == 1000.0 and least[0, 0, 0] == -1000.0
    assert reduce_with(at, 1000.0)[3][0, 0, 0] == 1000.0
    for bad in reduce_with(at, np.nan):
      assert np.isnan(bad).reshape(-1).tolist() == [True, False]


@pytest.mark.unoptimized
@ALL
def test_scales_do_not_count_the_padding(shape):
  x = np.random.default_rng(0).standard_normal(shape).astype(np.float32)

  @jax.jit
  def reduce(x):
    return [
      (
        reduce_blocks(x, *cut, max_magnitude),
        reduce_blocks(x, *cut, sum_magnitudes, past_end=0.0),
      )
      for cut in CUTS
    ]

  for (planes, block), found in zip(CUTS, reduce(x), strict=True):
    p, count, width = block_shape(shape, planes, block)
    axes = scale_axes(x.size, block)
    flat = np.abs(np.pad(x.reshape(-1), (0, p * count * width - x.size)))
    cut = flat.reshape(p, count, width)
    np.testing.assert_allclose(
      found[1], cut.sum(axes, keepdims=True), rtol=2**-18
    )
    if not x.size:
      continue
    # Blocks past the end have the last element's magnitude.
    past = (np.arange(p * count) * width >= x.size).reshape(p, count, 1)
    greatest = cut.max(axes, keepdims=True)
    if axes == (2,):
      greatest = np.where(past, flat[x.size - 1], greatest)
    np.testing.assert_array_equal(found[0], greatest)
