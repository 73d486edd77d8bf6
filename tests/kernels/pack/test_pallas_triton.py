import functools

import jax.numpy as jnp
import numpy as np
import pytest

from jaxmotion.kernels import pack as room
from jaxmotion.kernels.pack import (
  _pallas_triton as triton,
  _reference as reference,
)
from tests.kernels.lowering import check_kernel


# Packed indices have 10 to 16 bits and more; 11 bits are three fields. One
# code, whole columns, past a tile, whole tiles.
@pytest.mark.parametrize(
  ("bits", "size"),
  [
    *((bits, 999) for bits in (1, 3, 8, 11, 22, 32)),
    (3, 1),
    (4, 64),
    (8, 4 * 513),
    (8, 4 * 1024),
  ],
)
def test_words_and_codes_are_those_of_the_reference(bits, size):
  codes = np.random.default_rng(bits).integers(0, 2**bits, size, np.uint32)
  check = functools.partial(check_kernel, triton, reference, bits=bits)
  words = check("pack_flat", codes)
  np.testing.assert_array_equal(check("unpack_flat", words, size=size), codes)


def test_no_codes_are_the_reference_s(monkeypatch):
  monkeypatch.setenv("JAXMOTION_KERNELS", "pallas_triton")
  assert room.pack_flat(jnp.zeros((0,), jnp.uint32), 4).shape == (1, 0)
