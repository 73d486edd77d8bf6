import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from jaxmotion import codecs, make_key
from jaxmotion.codecs import Codec
from jaxmotion.testing import (
  check_codec,
  check_round_trips,
  check_unbiased,
  find_breaches,
  make_rows,
)
from tests.codecs.table import ALGORITHMS, ARRAYS, CODECS, KINDS, ULPS

ROWS = CODECS | ALGORITHMS
# Not a multiple of a block, a word or a row.
X = ARRAYS["odd"].flat[:65].reshape(13, 5)
# One codec of each base class, and each that remembers something. Of the others
# test_frozen holds that eager payloads are those of a program.
WHOLE = "int4_feedback bf16 int4_stochastic topk_int8 random_k".split()
# It has the optimized programs of these, too.
STATES = "dgc ef21 low_rank onebit sparse_loco".split()


@pytest.mark.parametrize(
  "name",
  [*WHOLE, *(pytest.param(n, marks=pytest.mark.unoptimized) for n in STATES)],
)
def test_properties_and_laws_hold(name):
  check_codec(ROWS[name], jnp.asarray(X), ulps=ULPS.get(name, 0))


# Those of all others, whose optimized programs test_frozen has.
@pytest.mark.unoptimized
@pytest.mark.parametrize("name", sorted(ROWS.keys() - {*WHOLE, *STATES}))
def test_laws_hold_for_every_codec(name):
  assert find_breaches(ROWS[name], make_rows(X)) == []


# Of float32, test_frozen has an array of many blocks, compiled as users do.
@pytest.mark.unoptimized
@pytest.mark.parametrize("name", [*KINDS, "lloyd_max2"])
def test_any_shape_and_width_comes_back_within_the_stated_bound(name):
  odd = ARRAYS["odd"].astype(np.float16)
  # The greatest float stays finite, the least one stays within the bound.
  odd.flat[:25] = ARRAYS["half"]
  arrays = [ARRAYS["scalar"], ARRAYS["empty"]]
  arrays += [odd, ARRAYS["odd"].astype(ml_dtypes.bfloat16)]
  check_round_trips(ROWS[name], [jnp.asarray(x) for x in arrays])


# One bit has levels of its own; the widths between round by the same code.
@pytest.mark.parametrize(
  "codec",
  [
    *(
      codecs.uniform(
        bits=bits, symmetric=symmetric, rounding="stochastic", block=32
      )
      for bits, symmetric in ((1, True), (1, False), (5, True), (8, False))
    ),
    codecs.ternary(block=40),
    codecs.nonnegative(block=64, rounding="stochastic"),
    codecs.nonnegative(block=64, bits=16, rounding="stochastic"),
  ],
  ids=repr,
)
def test_stochastic_rounding_is_unbiased(codec):
  x = jnp.asarray(ARRAYS["odd"])
  is_positive = isinstance(codec, codecs.nonnegative)
  check_unbiased(codec, jnp.exp2(3 * x) if is_positive else x)


def test_the_stated_payload_is_that_of_no_map():
  """A map's first call leaves no types of its mesh to later ones."""
  codec = codecs.uniform(bits=4, block=40)
  mesh = jax.make_mesh((1,), ("data",))
  asked = []

  def ask(x):
    asked.append(codec.payload_like(x))
    return x

  run = jax.shard_map(ask, mesh=mesh, in_specs=jax.P(), out_specs=jax.P())
  jax.jit(run)(jnp.ones((3, 40)))
  leaves = jax.tree.leaves([asked, codec.payload_like(jnp.ones((3, 40)))])
  assert all(leaf.sharding is None for leaf in leaves)


@pytest.mark.parametrize(
  "name",
  [
    name
    for name, codec in CODECS.items()
    if type(codec)._payload_like is not Codec._payload_like
  ],
)
def test_the_stated_payload_is_that_of_the_encoder(name):
  """Payloads in blocks are stated by formula; the others are traced."""
  codec = CODECS[name]

  def encode(x):
    return codec.encode(x, codec.init(x), make_key(0))[0]

  for shape in ((8, 16, 33), (50, 256)):
    like = jax.ShapeDtypeStruct(shape, jnp.bfloat16)
    assert codec.payload_like(like) == jax.eval_shape(encode, like)
