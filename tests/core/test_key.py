import itertools
import zlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmotion.core import (
  Key,
  combine_seeds,
  make_key,
  random_words,
)

SIZE = 1 << 15
SIGMAS = 5.0


def words(key):
  return int(key.shared), int(key.worker)


def families():
  """Seeds of 8 neighbors of each kind."""
  key = make_key(0)
  return {
    "raw seeds": [jnp.uint32(i) for i in range(8)],
    "seeds": [make_key(i).worker for i in range(8)],
    "shared": [make_key(i).shared for i in range(8)],
    "workers": [make_key(0, i).worker for i in range(8)],
    "steps": [key.fold(i).worker for i in range(8)],
    "leaves": [key.fold_path(f"layer_{i}/kernel").worker for i in range(8)],
  }


FAMILIES = pytest.mark.parametrize("family", list(families()))


def uniform(seed, shape):
  return (random_words(seed, shape) >> 8).astype(jnp.float32) * 2.0**-24


def draws(family, fn=uniform):
  return np.asarray(
    jax.vmap(lambda s: fn(s, (SIZE,)))(jnp.stack(families()[family]))
  )


def test_workers_share_one_word_and_have_the_other_to_themselves():
  keys = jax.vmap(lambda w: make_key(3, w).fold(7).fold_path("a/b"))(
    jnp.arange(64)
  )
  assert len(set(keys.shared.tolist())) == 1
  assert len(set(keys.worker.tolist())) == 64


def test_the_two_words_of_a_key_differ():
  for seed in range(50):
    key = make_key(seed)
    assert words(key)[0] != words(key)[1]


def test_a_leafs_key_does_not_depend_on_the_leaves_before_it():
  key = make_key(1)
  forward = {p: words(key.fold_path(p)) for p in ("a", "b/0", "b/1")}
  backward = {p: words(key.fold_path(p)) for p in ("b/1", "b/0", "a")}
  assert forward == backward
  assert len(set(forward.values())) == 3


def test_paths_with_a_large_checksum_fold():
  path = next(
    p for p in map(str, range(100)) if zlib.crc32(p.encode()) >= 2**31
  )
  assert words(make_key(0).fold_path(path)) == words(
    make_key(0).fold(zlib.crc32(path.encode()))
  )


@pytest.mark.parametrize("seed", [-1, 2**31, 2**32 + 5, 2**64 - 1, 10**30])
def test_integers_of_any_size_are_taken_by_their_low_word(seed):
  low = seed % 2**32
  expected = words(make_key(low, low).fold(low))
  assert words(make_key(seed, seed).fold(seed)) == expected
  traced = jnp.uint32(low)
  assert words(make_key(traced, traced).fold(traced)) == expected
  signed = traced.astype(jnp.int32)
  assert words(make_key(signed, signed).fold(signed)) == expected


def test_keys_pass_through_jit_with_the_same_bits():
  def make(seed, worker, step):
    return make_key(seed, worker).fold(step).fold_path("w")

  eager, jitted = make(5, 2, 9), jax.jit(make)(5, 2, 9)
  assert isinstance(jitted, Key) and words(eager) == words(jitted)
  assert eager.shared.dtype == eager.worker.dtype == jnp.uint32


@pytest.mark.parametrize("shape", [(), (0,), (7,), (3, 5)])
def test_draws_have_the_same_bits_under_jit(shape):
  seed = make_key(4).worker
  eager = random_words(seed, shape)
  jitted = jax.jit(lambda s: random_words(s, shape))(seed)
  assert eager.shape == shape and eager.dtype == jitted.dtype
  assert np.asarray(eager).tobytes() == np.asarray(jitted).tobytes()


def test_a_draw_of_another_shape_holds_the_same_numbers():
  seed = make_key(4).worker
  flat, square = random_words(seed, (6,)), random_words(seed, (2, 3))
  np.testing.assert_array_equal(flat, square.reshape(-1))


@FAMILIES
def test_uniform_values_have_the_moments_of_a_uniform(family):
  u = draws(family).astype(np.float64)
  assert u.min() >= 0 and u.max() < 1
  # Standard errors of the mean and of the variance of SIZE uniform values.
  mean_sigma, var_sigma = (12 * SIZE) ** -0.5, (180 * SIZE) ** -0.5
  assert np.abs(u.mean(1) - 1 / 2).max() <= SIGMAS * mean_sigma
  assert np.abs(u.var(1) - 1 / 12).max() <= SIGMAS * var_sigma


@FAMILIES
def test_values_fill_all_bins_evenly(family):
  counts = np.array(
    [np.bincount((u * 64).astype(int), minlength=64) for u in draws(family)]
  )
  expected = SIZE / 64
  chi2 = ((counts - expected) ** 2 / expected).sum(1)
  # 63 degrees of freedom: mean 63, variance 126.
  assert np.abs(chi2 - 63).max() <= SIGMAS * 126**0.5


@FAMILIES
def test_neighbors_are_not_correlated(family):
  u = draws(family).astype(np.float64)
  for lag in (0, 1, 2):
    rows = [np.roll(row, lag * i) for i, row in enumerate(u)]
    off = np.corrcoef(rows)[np.triu_indices(len(rows), 1)]
    assert np.abs(off).max() <= SIGMAS / SIZE**0.5


def test_successive_values_are_not_correlated():
  u = draws("seeds").astype(np.float64) - 0.5
  for lag in (1, 2, 3, 64):
    r = 12 * (u[:, lag:] * u[:, :-lag]).mean(1)
    assert np.abs(r).max() <= SIGMAS / (SIZE - lag) ** 0.5


@FAMILIES
def test_neighbors_do_not_walk_the_same_sequence(family):
  rows = draws(family, random_words)
  for a, b in itertools.combinations(rows, 2):
    # Chance alone: SIZE^2 / 2^32 = 0.25 words in common.
    assert np.intersect1d(a, b).size <= 5


@FAMILIES
def test_every_bit_is_set_half_of_the_time(family):
  bits = np.unpackbits(draws(family, random_words).view(np.uint8), axis=1)
  share = bits.reshape(8, SIZE, 32).mean(1)
  assert np.abs(share - 0.5).max() <= SIGMAS * 0.5 / SIZE**0.5


def test_combining_is_neither_symmetric_nor_associative():
  a, b = jnp.uint32(1), jnp.uint32(2)
  assert int(combine_seeds(a, b)) != int(combine_seeds(b, a))
  left = combine_seeds(combine_seeds(jnp.uint32(0), a), b)
  right = combine_seeds(combine_seeds(jnp.uint32(0), b), a)
  assert int(left) != int(right)
