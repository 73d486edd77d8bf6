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
    *((bits, 999) for bits in (1, 3, 4, 11, 22)),
    (3, 1),
    (4, 64),
    (4, 8 * 513),
    (4, 8 * 1024),
  ],
)
def test_words_and_codes_are_those_of_the_reference(bits, size):
  codes = np.random.default_rng(bits).integers(0, 2**bits, size, np.uint32)
  check = functools.partial(check_kernel, triton, reference, bits=bits)
  words = check("pack_flat", codes)
  found = check("unpack_flat", words, size=size, dtype="uint32")
  np.testing.assert_array_equal(found, codes)


def test_narrow_codes_have_the_same_words():
  codes = np.random.default_rng(0).integers(0, 2**7, 999, np.uint8)
  check = functools.partial(check_kernel, triton, reference, bits=7)
  words = check("pack_flat", codes)
  np.testing.assert_array_equal(
    words, reference.pack_flat(codes.astype(np.uint32), 7)
  )
  found = check("unpack_flat", words, size=999, dtype="uint8")
  assert found.dtype == np.uint8
  np.testing.assert_array_equal(found, codes)


def test_no_codes_are_the_reference_s(monkeypatch):
  monkeypatch.setenv("JAXMOTION_KERNELS", "pallas_triton")
  assert room.pack_flat(jnp.zeros((0,), jnp.uint32), 4).shape == (1, 0)


def test_whole_bytes_need_no_kernel():
  with pytest.raises(NotImplementedError, match="whole bytes"):
    room.pack_flat(jnp.zeros(8, jnp.uint8), 8, implementation="pallas_triton")
