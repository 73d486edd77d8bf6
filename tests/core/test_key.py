import zlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmotion.core import Key, combine_seeds, make_key, random_words

SIZE = 1 << 15
SIGMAS = 5.0


def words(key):
  return int(key.shared), int(key.worker)


def list_seeds():
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


@pytest.fixture(scope="module")
def drawn():
  """Words of neighbors by kind, uint32[8, SIZE] each."""
  draw = jax.jit(jax.vmap(lambda seed: random_words(seed, (SIZE,))))
  seeds = jax.jit(list_seeds)()
  return {name: np.asarray(draw(jnp.stack(s))) for name, s in seeds.items()}


def test_workers_share_one_word_and_have_the_other_to_themselves():
  @jax.jit
  @jax.vmap
  def make(seed, worker):
    return make_key(seed, worker).fold(7).fold_path("a/b"), make_key(seed)

  keys, _ = make(jnp.full(64, 3), jnp.arange(64))
  assert len(set(keys.shared.tolist())) == 1
  assert len(set(keys.worker.tolist())) == 64
  _, keys = make(jnp.arange(50), jnp.zeros(50, int))
  assert (keys.shared != keys.worker).all()


def test_paths_fold_by_their_checksums():
  key = make_key(1)
  # A large checksum is no int32.
  large = next(p for p in map(str, range(100)) if zlib.crc32(p.encode()) >> 31)
  found = {p: words(key.fold_path(p)) for p in ("a", "b/0", "b/1", large)}
  assert len(set(found.values())) == 4
  for path, folded in found.items():
    assert folded == words(key.fold(zlib.crc32(path.encode())))


@pytest.mark.parametrize("seed", [-1, 2**31, 2**32 + 5, 2**64 - 1, 10**30])
def test_integers_of_any_size_are_taken_by_their_low_word(seed):
  low = jnp.uint32(seed % 2**32)
  expected = words(make_key(low, low).fold(low))
  for one in (seed, seed % 2**32, low.astype(jnp.int32)):
    assert words(make_key(one, one).fold(one)) == expected


def test_keys_and_draws_have_the_same_bits_under_jit():
  def make(seed, worker, step):
    key = make_key(seed, worker).fold(step).fold_path("w")
    shapes = (), (0,), (6,), (2, 3)
    return key, [random_words(key.worker, shape) for shape in shapes]

  eager, jitted = make(5, 2, 9), jax.jit(make)(5, 2, 9)
  jax.tree.map(np.testing.assert_array_equal, eager, jitted)
  key, draws = eager
  assert isinstance(jitted[0], Key)
  assert key.shared.dtype == key.worker.dtype == jnp.uint32
  assert [a.shape for a in draws] == [(), (0,), (6,), (2, 3)]
  # A draw of another shape holds the same numbers.
  np.testing.assert_array_equal(draws[2], draws[3].reshape(-1))


def test_values_are_uniform_and_no_neighbors_are_correlated(drawn):
  # Standard errors of the mean and of the variance of SIZE uniform values.
  mean_sigma, var_sigma = (12 * SIZE) ** -0.5, (180 * SIZE) ** -0.5
  expected = SIZE / 64
  for found in drawn.values():
    u = (found >> 8) * 2.0**-24
    assert np.abs(u.mean(1) - 1 / 2).max() <= SIGMAS * mean_sigma
    assert np.abs(u.var(1) - 1 / 12).max() <= SIGMAS * var_sigma
    counts = [np.bincount(row >> 26, minlength=64) for row in found]
    chi2 = ((np.array(counts) - expected) ** 2 / expected).sum(1)
    # 63 degrees of freedom: mean 63, variance 126.
    assert np.abs(chi2 - 63).max() <= SIGMAS * 126**0.5
    for lag in (0, 1, 2):
      rows = [np.roll(row, lag * i) for i, row in enumerate(u)]
      off = np.corrcoef(rows)[np.triu_indices(len(rows), 1)]
      assert np.abs(off).max() <= SIGMAS / SIZE**0.5
    bits = np.unpackbits(found.view(np.uint8), axis=1).reshape(8, SIZE, 32)
    assert np.abs(bits.mean(1) - 0.5).max() <= SIGMAS * 0.5 / SIZE**0.5
    # Chance alone: (8 SIZE)^2 / 2^33 = 8 words come twice, give or take 3.
    assert found.size - np.unique(found).size <= 8 + SIGMAS * 3
  u = drawn["seeds"] * 2.0**-32 - 0.5
  for lag in (1, 2, 3, 64):
    r = 12 * (u[:, lag:] * u[:, :-lag]).mean(1)
    assert np.abs(r).max() <= SIGMAS / (SIZE - lag) ** 0.5


def test_combining_is_neither_symmetric_nor_associative():
  a, b, zero = jnp.uint32([1, 2, 0])
  assert int(combine_seeds(a, b)) != int(combine_seeds(b, a))
  left = combine_seeds(combine_seeds(zero, a), b)
  assert int(left) != int(combine_seeds(combine_seeds(zero, b), a))
