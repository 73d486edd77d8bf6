import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

from jaxmotion import codecs, collectives, make_key, wire
from tests.codecs.table import CODECS, KINDS
from tests.collectives.helpers import copies, over, run

X = np.random.default_rng(1).normal(size=(4, 8, 6)).astype(np.float32)
UNCOMPRESSED = {
  "reduce_scatter": lambda x: lax.psum_scatter(x, "data", tiled=True),
  "all_gather": lambda x: lax.all_gather(x, "data", to="invarying"),
  "all_to_all": lambda x: lax.all_to_all(x, "data", 0, 0, tiled=True),
}
OUT = {"reduce_scatter": P("data"), "all_gather": P(), "all_to_all": P("data")}
OPS = pytest.mark.parametrize("op", UNCOMPRESSED)
# Every codec travels one way, these all ways: of floats, of words, with a seed
# that is not summed, with memory.
EVERY_WAY = ("identity", "int8", "random_k", "topk_feedback")
PAIRS = pytest.mark.parametrize(
  ("op", "name"),
  [
    (op, name)
    for i, name in enumerate(KINDS)
    for j, op in enumerate(UNCOMPRESSED)
    if i % len(UNCOMPRESSED) == j or name in EVERY_WAY
  ],
)


def init(op, x, codec):
  one = "all_gather" if op == "all_gather" else "reduce_scatter"
  return getattr(collectives, f"{one}_init")(x, "data", codec)


def ours(op, codec):
  def call(x):
    state = init(op, x, codec)
    key = make_key(0, lax.axis_index("data"))
    collective = getattr(collectives, op)
    return collective(x, "data", codec, state=state, key=key)[0]

  return call


@functools.cache
def uncompressed(op):
  return np.asarray(run(UNCOMPRESSED[op], X, 4, OUT[op]))


@PAIRS
def test_every_codec_comes_close_and_its_bytes_are_those_it_says(op, name):
  codec = CODECS[name]
  program = over(ours(op, codec), 4, OUT[op])
  compiled = program.lower(X).compile()  # What is run is what is counted.
  y = compiled(X)
  assert y.shape == uncompressed(op).shape
  assert op != "all_gather" or len(copies(y)) == 1
  error = codec.laws.error
  if name == "identity":
    np.testing.assert_array_equal(y, uncompressed(op))
  # The laws hold where nothing is dropped.
  if error is not None and name != "zero_value_half":
    # Bounds grow with |x|, so the greatest one holds for every slice.
    peak = np.abs(X).max()
    most = 4 * ((error.relative + error.peak) * peak + error.floor) + 1e-5
    assert np.abs(y - uncompressed(op)).max() <= most
  if op == "all_gather":
    said = 3 * wire.payload_bytes(codec, X[0])
  else:
    row = wire.payload_bytes(codec, X[0, :2])
    if codec.summable and op == "reduce_scatter" and "random" in name:
      row -= 4  # the seed is equal on all workers and does not travel
    said = 3 * row
  assert said == wire.step_bytes(program, X).total_bytes
  assert said == wire.compiled_bytes(compiled).total_bytes


@OPS
def test_the_gradient_is_the_uncompressed_collectives(op):
  functions = ours(op, codecs.uniform(bits=8)), UNCOMPRESSED[op]

  def local(x):
    double = lambda f: lambda x: jnp.sum(f(x) * jnp.float32(2.0))
    return [jax.grad(double(f))(x)[None] for f in functions]

  np.testing.assert_allclose(*run(local, X, 4, P("data")))


@pytest.mark.parametrize("op", ["reduce_scatter", "all_to_all"])
def test_an_axis_that_workers_do_not_divide_is_named(op):
  with pytest.raises(ValueError, match=r"whose length 4 workers divide.*float"):
    run(ours(op, codecs.identity()), X[:, :6], 4, P("data"))


def test_tree_codecs_are_refused_where_an_array_is_exchanged():
  codec = codecs.rules([(".*", codecs.identity())])
  with pytest.raises(TypeError, match="`codec` must be a codec of arrays"):
    run(lambda x: collectives.all_gather(x, "data", codec)[0], X, 4)


def test_error_memory_works_in_every_collective():
  codec = codecs.feedback(codecs.uniform(bits=2))

  def twice(x, op):
    collective = getattr(collectives, op)
    a, state = collective(x, "data", codec, state=init(op, x, codec))
    b, _ = collective(x, "data", codec, state=state)
    return a, a + b

  local = lambda x: {op: twice(x, op) for op in OUT}
  for op, (a, sent) in run(local, X, 4, OUT).items():
    once = np.abs(2 * np.asarray(a) - 2 * uncompressed(op)).sum()
    assert np.abs(np.asarray(sent) - 2 * uncompressed(op)).sum() < once
