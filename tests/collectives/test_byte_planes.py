import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

from jaxmotion import codecs, collectives, controllers, wire
from jaxmotion.collectives import _transport
from tests.collectives.helpers import bind, copies, run
from tests.compilations import compilations

EDGES = np.uint32(
  [
    *(0x00000000, 0x80000000, 0x00000001, 0x807FFFFF, 0x00800000),
    *(0x7F7FFFFF, 0xFF7FFFFF, 0x7F800000, 0xFF800000),
    *(0x7F800001, 0xFF80FFFF, 0x7FC00000, 0xFFFFFFFF, 0x3F8080FF),
  ]
).view(np.float32)


def values(workers):
  """Trees of every worker; each has the edge cases in another row."""
  rng = np.random.default_rng(3)
  a = rng.normal(size=(workers, 8, 14)).astype(np.float32)
  for w in range(workers):
    a[w, w] = EDGES
  b = rng.normal(size=(workers, 4)).astype(np.float32)
  return {"a": a, "b": b, "none": np.zeros((workers, 0, 3), np.float32)}


X = values(4)
OPS = pytest.mark.parametrize(
  "op", ["all_gather_planes", "broadcast_planes"], ids=["gather", "broadcast"]
)
LEVELS = range(4)


@functools.cache
def program(op, workers, **options):
  collective = getattr(collectives, op)

  def local(x, level):
    own = jax.tree.map(lambda a: a[0], x)
    return collective(own, "data", level, **options)

  return bind(local, workers, (P("data"), P()))


@functools.cache
def round_trip(codec):
  return jax.jit(lambda x: codec.decode(codec.encode(x)[0], x))


def truncated(x, level, rounding="zero"):
  """Every worker's tree through the codec of a level."""
  codec = codecs.truncate(bytes=level + 1, rounding=rounding)
  return jax.tree.map(round_trip(codec), x)


def same_bits(tree, expected):
  def compare(a, b):
    a, b = (np.asarray(v).view(np.uint32) for v in (a, b))
    np.testing.assert_array_equal(a, b)

  jax.tree.map(compare, tree, expected)


def test_gathered_is_what_truncate_leaves_of_every_worker(monkeypatch):
  # As large payloads, which two workers gather by way of a sum.
  monkeypatch.setattr(_transport, "_MAX_GATHER_BYTES", 0)
  x = values(2)
  f = program("all_gather_planes", 2, rounding="nearest")
  for level in LEVELS:
    found = f(x, jnp.int32(level))
    same_bits(found, truncated(x, level, rounding="nearest"))


def test_broadcast_is_what_truncate_leaves_of_the_source():
  f = program("broadcast_planes", 4, source=1)
  own = jax.tree.map(lambda a: a[1], X)
  for level in LEVELS:
    same_bits(f(X, jnp.int32(level)), truncated(own, level))


@pytest.mark.parametrize("axis", [1, -2])
def test_tiled_rows_are_joined_along_the_axis(axis):
  f = program("all_gather_planes", 4, axis=axis, tiled=True)
  x = {"a": X["a"], "none": X["none"]}
  expected = jax.tree.map(
    lambda a: np.concatenate(list(a), axis=axis), truncated(x, 1)
  )
  same_bits(f(x, jnp.int32(1)), expected)


@OPS
def test_a_level_sends_only_its_own_bytes_as_words_in_one_collective(op):
  # A gather sends to 3 others; a sum sends 2 (4 - 1) / 4.
  times = {"all_gather_planes": 3, "broadcast_planes": 1.5}[op]
  f, own = program(op, 4), jax.tree.map(lambda a: a[0], X)
  expected = truncated(X if op == "all_gather_planes" else own, 1)
  levels = list(map(jnp.int32, LEVELS))
  before = compilations()
  trees = [f(X, level) for level in levels]
  assert compilations() - before <= 1
  errors = [np.abs(t["b"] - trees[-1]["b"]).max() for t in trees]
  assert errors[0] > errors[1] > errors[2] > errors[3] == 0
  same_bits(trees[1], expected)
  assert len(copies(trees[1]["a"])) == 1
  compiled = f.lower(X, levels[0]).compile()
  for level in LEVELS:
    said = wire.payload_bytes(codecs.truncate(bytes=level + 1), own)
    assert said == (level + 1) * (8 * 14 + 4)
    traced = wire.step_bytes(f, X, levels[0], branch=level)
    real = wire.compiled_bytes(compiled, branch=level)
    assert traced.total_bytes == real.total_bytes == times * said
    for ledger in (traced, real):
      assert [move.dtype for move in ledger.moves] == ["uint8"]


UNCOMPRESSED = {
  "all_gather_planes": lambda x: lax.all_gather(x, "data", to="invarying"),
  "broadcast_planes": lambda x: lax.psum(
    jnp.where(lax.axis_index("data") == 0, x, 0.0), "data"
  ),
}


@OPS
def test_the_gradient_is_the_uncompressed_collectives(op):
  uncompressed, planes = UNCOMPRESSED[op], getattr(collectives, op)
  functions = (
    lambda x: planes(x, "data", 3),
    uncompressed,
    # At other levels it is the same gradient, at the truncated elements.
    lambda x: planes(x, "data", 0),
    lambda x: uncompressed(x) - jnp.float32(0.5),
  )

  def local(x):
    losses = [
      lambda x, f=f: jnp.sum(jnp.sin(jnp.float32(2) * f(x))) for f in functions
    ]
    return [jax.grad(loss)(x)[None] for loss in losses]

  grads = run(local, np.ones((4, 3), np.float32), 4, P("data"))
  assert np.abs(grads[0]).max() > 0
  np.testing.assert_allclose(grads[0], grads[1])
  np.testing.assert_allclose(grads[2], grads[3])


@OPS
def test_bad_arguments_are_named(op):
  narrow = {"w": jnp.ones((4, 2), jnp.bfloat16)}
  own = lambda: lax.axis_index("data")
  for x, level, error, message in (
    (X, own, ValueError, "`level` must be equal on all workers"),
    (X, lambda: 4, ValueError, r"`level` must be in \[0, 3\], got 4"),
    (
      narrow,
      lambda: 1,
      TypeError,
      r"`x/w` must be a float32 array, got bfloat",
    ),
  ):
    call = lambda x, level=level: getattr(collectives, op)(x, "data", level())
    with pytest.raises(error, match=message):
      run(call, x, 4)
  with pytest.raises(ValueError, match=r"`source` must be .* in \[0, 3\]"):
    run(lambda x: collectives.broadcast_planes(x, "data", 0, source=4), X, 4)


def test_sharded_weights_are_gathered_at_the_level_of_their_norms():
  control = controllers.awp(threshold=0.0, interval=1)
  weights = np.random.default_rng(0).normal(size=(8, 4)).astype(np.float32)

  def local(part):
    def norm(part):
      return jnp.sqrt(lax.psum(jnp.sum(part**2), "data"))[None]

    state = control.update(norm(part / 2), control.init(norm(part)))
    level = control.level(state)[0]
    return collectives.all_gather_planes(part, "data", level, tiled=True)

  np.testing.assert_array_equal(bind(local, 4)(weights), truncated(weights, 1))
