import jax.numpy as jnp
import numpy as np
import pytest

from jaxmotion.kernels.compact import compact, expand, mark, select, starts

# One word, one level of the tree, two levels, three.
SIZES = pytest.mark.parametrize("size", [0, 1, 32, 33, 1024, 1100, 40000])
DENSITIES = pytest.mark.parametrize("density", [0.0, 0.02, 0.5, 1.0])


def keep_of(size: int, density: float) -> np.ndarray:
  return np.random.default_rng(size).random(size) < density


@SIZES
@DENSITIES
def test_starts_count_the_marks_before_each_word(size, density):
  keep = keep_of(size, density)
  got = starts(mark(jnp.asarray(keep)))
  padded = np.pad(keep, (0, -size % 32)).reshape(-1, 32).sum(1)
  np.testing.assert_array_equal(got, np.concatenate([[0], padded.cumsum()]))


@SIZES
@DENSITIES
@pytest.mark.parametrize("share", [0.1, 0.5, 1.0])
def test_the_first_marked_values_are_packed_in_order(size, density, share):
  keep, capacity = keep_of(size, density), int(share * size)
  values = np.arange(1, size + 1, dtype=np.float32)
  bitmap = mark(jnp.asarray(keep))
  got = compact(jnp.asarray(values), bitmap, starts(bitmap), capacity)
  kept = values[keep][:capacity]
  np.testing.assert_array_equal(got, np.pad(kept, (0, capacity - kept.size)))


@SIZES
@DENSITIES
@pytest.mark.parametrize("share", [0.1, 1.0])
def test_expansion_inverts_compaction_up_to_its_capacity(size, density, share):
  keep, capacity = keep_of(size, density), int(share * size)
  values = np.arange(1, size + 1, dtype=np.uint32)
  bitmap = mark(jnp.asarray(keep))
  start = starts(bitmap)
  packed = compact(jnp.asarray(values), bitmap, start, capacity)
  inside = keep & (keep.cumsum() <= capacity)
  np.testing.assert_array_equal(
    expand(packed, bitmap, start, size), np.where(inside, values, 0)
  )


# Below one slot in 64 entries a search finds them, above it a compaction.
@SIZES
@DENSITIES
@pytest.mark.parametrize("share", [0.01, 0.5])
def test_selection_finds_the_first_marks(size, density, share):
  keep, capacity = keep_of(size, density), int(share * size)
  bitmap = mark(jnp.asarray(keep))
  got = select(bitmap, starts(bitmap), capacity)
  assert got.shape == (capacity,)
  found = np.flatnonzero(keep)[:capacity]
  np.testing.assert_array_equal(got[: found.size], found)
