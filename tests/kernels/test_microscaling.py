import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from jaxmotion.kernels.microscaling import FORMATS, MicroscalingOp
from jaxmotion.kernels.pack import pack_flat, unpack_flat

# The format without a mantissa is checked in tests/codecs: ml_dtypes has none.
NAMES = pytest.mark.parametrize("name", [n for n in FORMATS if "e3m0" not in n])


@NAMES
def test_every_code_decodes_to_its_value(name):
  form = FORMATS[name]
  codes = np.arange(2**form.bits, dtype=np.uint32)
  codes = codes[(codes & (2 ** (form.bits - 1) - 1)) <= form.most]
  x = np.zeros(codes.size, np.float32)
  op = MicroscalingOp(format=name, block=1)
  empty = jax.eval_shape(lambda x: op.encode(x, None), x)

  @jax.jit
  def decode(codes):
    scale = jnp.full(codes.size, 127, jnp.uint8)
    words = pack_flat(codes, form.bits)
    return op.decode(empty._replace(words=words, scale=scale), x)

  exact = codes.astype(np.uint8).view(getattr(ml_dtypes, name))
  np.testing.assert_array_equal(decode(codes), exact.astype(np.float32))


@NAMES
def test_every_value_and_every_tie_rounds_as_ml_dtypes(name):
  form, kind = FORMATS[name], getattr(ml_dtypes, name)
  most = float(ml_dtypes.finfo(kind).max)
  values = np.arange(form.most + 1, dtype=np.uint8).view(kind)
  values = values.astype(np.float32)
  ties = (values[:-1] + values[1:]) / 2
  points = np.concatenate([values, ties])
  near = [np.nextafter(points, np.float32(s)) for s in (-np.inf, np.inf)]
  points = np.clip(np.concatenate([points, *near]), 0, most)
  points = np.concatenate([points, -points])
  # The greatest value leads, so that the scale of the one block is 1.
  x = np.concatenate([[most], points]).astype(np.float32)
  op = MicroscalingOp(format=name, block=x.size)

  @jax.jit
  def encode(x):
    payload = op.encode(x, None)
    return payload.scale, unpack_flat(payload.words, form.bits, x.size)

  scale, codes = encode(x)
  assert scale.tolist() == [127]
  normal = np.abs(x) >= np.finfo(np.float32).tiny
  np.testing.assert_array_equal(
    np.asarray(codes)[normal], x.astype(kind).view(np.uint8)[normal]
  )
