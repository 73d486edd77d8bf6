"""Arrays that explicit axes of a mesh shard, outside of a map."""

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec as P

from jaxmotion import codecs, make_key

MESH = jax.make_mesh((2, 2), ("data", "model"))
X = np.random.default_rng(0).normal(size=(8, 16)).astype(np.float32)
UNIFORM = codecs.uniform(bits=4, block=16)
COLUMNS = P(None, "model")
WHOLE_BLOCKS = (UNIFORM, codecs.nonnegative())


def shard(spec):
  return jax.device_put(X, NamedSharding(MESH, spec))


def pass_through(codec, x):
  payload, _ = codec.encode(x, codec.init(x), make_key(0))
  return codec.decode(payload, x)


@pytest.mark.parametrize(
  "codec",
  [
    codecs.cast("bfloat16"),
    codecs.truncate(bytes=2),
    codecs.feedback(UNIFORM),
    codecs.microscaling(format="float8_e4m3fn"),
  ],
  ids=lambda codec: type(codec).__name__,
)
def test_whole_blocks_of_parts_are_encoded_where_they_are(codec):
  is_elementwise = isinstance(codec, codecs.cast | codecs.truncate)
  run = jax.jit(lambda x: pass_through(codec, x))
  found = run(shard(COLUMNS if is_elementwise else P("data")))
  np.testing.assert_array_equal(found, run(X))


@pytest.mark.parametrize(
  "codec",
  [
    codecs.topk(density=0.25),
    codecs.random_k(density=0.25),
    codecs.threshold(value=0.1, capacity=0.5),
    codecs.zero_value(capacity=1.0),
    codecs.ternary(),
    codecs.sign(),
    codecs.uniform(bits=8),
    codecs.uniform(bits=3, block=8),
    codecs.chain(codecs.rotate(), UNIFORM),
    codecs.chain(codecs.topk(density=0.25), codecs.cast("bfloat16")),
    codecs.feedback(codecs.topk(density=0.25)),
    codecs.rules([(".*", codecs.sign())]),
    *WHOLE_BLOCKS,
  ],
  ids=lambda codec: type(codec).__name__,
)
def test_others_and_axes_that_are_not_the_first_are_refused(codec):
  message = "`x` must not be sharded over explicit mesh axes.*specs="
  for mesh, spec in ((MESH, P("data")), (jax.make_mesh((), ()), COLUMNS)):
    if spec == P("data") and codec in WHOLE_BLOCKS:
      continue
    with jax.set_mesh(mesh), pytest.raises(ValueError, match=message):
      jax.eval_shape(lambda x: pass_through(codec, x), shard(spec))
