import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmotion.kernels import pack as room
from jaxmotion.kernels.pack import (
  _pallas_triton as triton,
  _reference as reference,
  num_planes,
)
from jaxmotion.kernels.pack._cases import CASES
from tests.kernels.lowering import kernel_calls, on_gpus

PACK = functools.partial(jax.jit, static_argnums=1)(reference.pack)
PACK_FLAT = functools.partial(jax.jit, static_argnums=1)(reference.pack_flat)


@pytest.mark.parametrize("case", CASES)
def test_words_and_codes_are_those_of_the_reference(case):
  bits = CASES[case].bits
  codes = jnp.asarray(CASES[case].make())
  words = PACK_FLAT(codes, bits)
  packing = functools.partial(triton.pack_flat, bits=bits, interpret=True)
  got = jax.jit(packing)(codes)
  assert got.dtype == jnp.uint32
  np.testing.assert_array_equal(got, words)
  unpacking = functools.partial(
    triton.unpack_flat, bits=bits, size=codes.size, interpret=True
  )
  np.testing.assert_array_equal(jax.jit(unpacking)(words), codes)


@pytest.mark.parametrize("shape", [(2, 3), ()])
def test_trailing_axes_are_kept(shape):
  codes = np.arange(num_planes(6), dtype=np.uint32)
  codes = codes.reshape(-1, *[1] * len(shape))
  codes = jnp.asarray(np.broadcast_to(codes, (num_planes(6), *shape)))
  words = PACK(codes, 6)
  np.testing.assert_array_equal(
    jax.jit(functools.partial(triton.pack, bits=6, interpret=True))(codes),
    words,
  )
  np.testing.assert_array_equal(
    jax.jit(functools.partial(triton.unpack, bits=6, interpret=True))(words),
    codes,
  )


@pytest.mark.parametrize(
  ("form", "gpu"), on_gpus([*((b, 1024) for b in (1, 3, 8, 11, 22)), (3, 33)])
)
def test_packing_and_unpacking_are_one_kernel_each(form, gpu):
  bits, columns = form
  codes = jnp.zeros((num_planes(bits), columns), jnp.uint32)

  def both(codes):
    words = triton.pack(codes, bits=bits)
    return words, triton.unpack(words, bits=bits)

  assert kernel_calls(both, codes, gpu=gpu) == 2


def test_a_batch_is_one_kernel():
  packing = functools.partial(triton.pack_flat, bits=3)
  codes = jnp.zeros((3, 1000), jnp.uint32)
  assert kernel_calls(jax.vmap(packing), codes) == 1


def test_a_shard_is_one_kernel():
  packing = functools.partial(triton.pack_flat, bits=3)
  sharded = jax.shard_map(
    packing, in_specs=jax.P("x"), out_specs=jax.P(None, "x")
  )
  assert kernel_calls(sharded, jnp.zeros(1000, jnp.uint32)) == 1


OPS = {
  "pack": lambda x, **how: room.pack(x.reshape(32, -1), 3, **how),
  "unpack": lambda x, **how: room.unpack(x.reshape(3, -1), 3, **how),
  "pack_flat": lambda x, **how: room.pack_flat(x, 3, **how),
  "unpack_flat": lambda x, **how: room.unpack_flat(
    x.reshape(3, -1), 3, 1000, **how
  ),
}


@pytest.mark.parametrize("op", OPS)
def test_kernels_run_if_named_and_not_otherwise(op):
  x = jnp.zeros(96 * 32, jnp.uint32)
  named = functools.partial(OPS[op], implementation="pallas_triton")
  assert kernel_calls(named, x) == 1
  # For a host.
  fn = lambda x: OPS[op](x)
  assert "triton" not in jax.jit(fn).lower(x).as_text()


@pytest.mark.parametrize(("bits", "kernels"), [(3, 1), (4, 0)])
def test_gpus_run_the_kernel_where_xla_reads_codes_twice(bits, kernels):
  codes = jnp.zeros(1000, jnp.uint32)
  assert kernel_calls(lambda x: room.pack_flat(x, bits), codes) == kernels


@pytest.mark.parametrize("bits", [0, 33])
def test_other_widths_are_refused(bits):
  for pack in (room.pack, room.pack_flat):
    with pytest.raises(ValueError, match=r"`bits` must be .* in \[1, 32\]"):
      pack(jnp.zeros((32, 1), jnp.uint32), bits)


def test_no_codes_are_the_reference_s(monkeypatch):
  monkeypatch.setenv("JAXMOTION_KERNELS", "pallas_triton")
  assert room.pack_flat(jnp.zeros((0,), jnp.uint32), 4).shape == (1, 0)
