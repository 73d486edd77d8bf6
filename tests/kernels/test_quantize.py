import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmotion.core import make_key
from jaxmotion.kernels import block_shape
from jaxmotion.kernels.pack._reference import num_planes, unpack
from jaxmotion.kernels.quantize import AbsmaxOp, MinMaxOp

# One bit has levels of its own; the widths between scale by the same code.
# Blocks of a plane of its own, of rows, and one scale for the whole array.
CASES = pytest.mark.parametrize(
  ("bits", "shape", "block"),
  [
    *((bits, (37, 29), 16) for bits in (1, 3, 8)),
    (7, (64, 48), 48),
    *((bits, (150,), 512) for bits in (1, 4)),
  ],
)


def normal(shape):
  return np.random.default_rng(0).normal(size=shape).astype(np.float32)


def in_blocks(x, bits, block):
  shape = block_shape(x.shape, num_planes(bits), block)
  flat = x.reshape(-1).astype(np.float64)
  pad = int(np.prod(shape)) - x.size
  b = np.pad(flat, (0, pad), mode="edge").reshape(shape)
  return b, ((0, 1, 2) if x.size <= block else (2,))


def check_codes(codes, exact, top):
  """Checks that codes are the nearest, except at ties of float32.

  A quotient, a scale and a sum, each rounded once at a size of at most `top`,
  are off by less than top * 2^-22; that is below 1e-4 for 8 bits.
  """
  wanted = np.clip(np.floor(exact + 0.5), 0, top)
  near = np.abs(exact + 0.5 - np.round(exact + 0.5)) <= top * 2.0**-22
  assert near.mean() < 0.02
  np.testing.assert_array_equal(np.where(near, wanted, codes), wanted)
  assert np.abs(codes - wanted).max() <= 1


def encode_and_unpack(op, x):
  """The payload of an array, and its codes."""

  @jax.jit
  def program(x):
    payload = op.encode(x, None)
    return payload, unpack(payload.words, op.bits)

  payload, codes = program(x)
  return payload, np.asarray(codes, np.int64)


@CASES
def test_symmetric_codes_are_the_nearest(bits, shape, block):
  x = normal(shape)
  payload, codes = encode_and_unpack(AbsmaxOp(bits=bits, block=block), x)
  b, axes = in_blocks(x, bits, block)
  peak = np.abs(b).max(axes, keepdims=True)
  assert payload.scale.shape == peak.shape[:2]
  if bits == 1:
    np.testing.assert_allclose(payload.scale, peak[..., 0], rtol=2.0**-15)
    # On the tie between the two levels, zero is positive.
    np.testing.assert_array_equal(codes, b >= 0)
    return
  steps = 2 ** (bits - 1) - 1
  np.testing.assert_allclose(payload.scale, peak[..., 0] / steps, rtol=2.0**-15)
  scale = np.asarray(payload.scale, np.float64)[..., None]
  safe = np.where(scale > 0, scale, 1)
  check_codes(codes, b / safe + steps, 2 * steps)


@CASES
def test_minmax_codes_are_the_nearest(bits, shape, block):
  x = normal(shape) + 3
  payload, codes = encode_and_unpack(MinMaxOp(bits=bits, block=block), x)
  b, axes = in_blocks(x, bits, block)
  low, high = b.min(axes, keepdims=True), b.max(axes, keepdims=True)
  top = 2**bits - 1
  np.testing.assert_array_equal(payload.low, low[..., 0])
  half = (high - low)[..., 0] / 2 / top
  scale = np.asarray(payload.scale, np.float64)
  # Rounded up to 16 bits, after two float32 roundings.
  assert (scale >= half * (1 - 2.0**-22)).all()
  assert (scale <= half * (1 + 2.0**-15 + 2.0**-22)).all()
  step = np.where(scale > 0, 2 * scale, 1)[..., None]
  check_codes(codes, (b - low) / step, top)


@pytest.mark.parametrize(
  ("kind", "bits"), [(AbsmaxOp, 1), (AbsmaxOp, 8), (MinMaxOp, 1), (MinMaxOp, 3)]
)
def test_stochastic_codes_are_one_of_the_two_next(kind, bits):
  x = normal((37, 29))

  @jax.jit
  def draw(x):
    op = kind(bits=bits, block=64)
    codes_of = lambda key: unpack(op.encode(x, key).words, bits)
    every = jax.vmap(lambda w: codes_of(make_key(0, w)))(jnp.arange(8))
    return codes_of(None), every

  nearest, drawn = (np.asarray(a, int) for a in draw(x))
  # Floor and ceiling are next to each other, and the nearest is one of them.
  assert (drawn.max(0) - drawn.min(0) <= 1).all()
  assert (np.abs(drawn - nearest) <= 1).all()
  assert (drawn[0] != drawn[1]).any()
