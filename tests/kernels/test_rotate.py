import functools

import jax
import numpy as np
import pytest

from jaxmotion.kernels.rotate._op import flip_signs, hadamard

FLIP_SIGNS = functools.partial(jax.jit, static_argnums=1)(flip_signs)


def matrix(length: int) -> np.ndarray:
  """Returns the Hadamard matrix by Sylvester's construction."""
  h = np.ones((1, 1))
  while h.shape[0] < length:
    h = np.block([[h, h], [h, -h]])
  return h / np.sqrt(length)


@pytest.mark.parametrize("length", [1, 2, 32, 64, 128, 256])
def test_it_is_sylvesters_matrix(length):
  got = jax.jit(hadamard)(np.eye(length, dtype=np.float32))
  # Each entry is one product: one rounding of the root.
  np.testing.assert_allclose(got, matrix(length), rtol=2**-23)


def test_signs_are_balanced_and_flip_back():
  x = np.ones((1000, 10), np.float32)
  flipped = np.asarray(FLIP_SIGNS(x, 3))
  # 10000 fair coins: 5 standard deviations are 500.
  assert abs(float(flipped.sum())) < 500
  np.testing.assert_array_equal(FLIP_SIGNS(flipped, 3), x)
