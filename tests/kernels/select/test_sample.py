import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmotion.kernels.select import draw_stratified, stratum_sizes

SHAPES = pytest.mark.parametrize(
  ("size", "k"), [(0, 0), (1, 1), (10, 3), (10, 7), (10, 10), (1000, 10)]
)


@SHAPES
def test_runs_are_equal_up_to_one_and_make_up_the_whole(size, k):
  sizes = np.asarray(stratum_sizes(size, k))
  assert sizes.sum() == size and sizes.shape == (k,)
  assert sizes.max(initial=0) - sizes.min(initial=size) <= 1


@SHAPES
def test_each_run_gives_one_position(size, k):
  ends = np.asarray(stratum_sizes(size, k)).cumsum()
  for seed in range(20):
    positions = np.asarray(draw_stratified(jnp.uint32(seed), size, k))
    assert (positions < ends).all()
    assert (positions[1:] >= ends[:-1]).all()


def test_positions_of_a_run_are_equally_likely():
  size, k, draws = 23, 4, 20_000
  seeds = jnp.arange(draws, dtype=jnp.uint32)
  drawn = jax.vmap(lambda s: draw_stratified(s, size, k))(seeds)
  counts = np.bincount(np.asarray(drawn).reshape(-1), minlength=size)
  sizes = np.asarray(stratum_sizes(size, k))
  chance = np.repeat(1 / sizes, sizes)
  spread = np.sqrt(draws * chance * (1 - chance))
  assert (np.abs(counts - draws * chance) < 5 * spread).all()
