import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

from jaxmotion import codecs, collectives, controllers, wire
from jaxmotion.core import to_varying
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


@pytest.mark.parametrize(
  ("workers", "options"), [(4, {}), (2, {"rounding": "nearest"})]
)
def test_gathered_is_what_truncate_leaves_of_every_worker(workers, options):
  x = values(workers)
  f = program("all_gather_planes", workers, **options)
  for level in LEVELS:
    same_bits(f(x, jnp.int32(level)), truncated(x, level, **options))


@pytest.mark.parametrize(("workers", "options"), [(4, {}), (2, {"source": 1})])
def test_broadcast_is_what_truncate_leaves_of_the_source(workers, options):
  x = values(workers)
  f = program("broadcast_planes", workers, **options)
  for level in LEVELS:
    own = jax.tree.map(lambda a: a[options.get("source", 0)], x)
    same_bits(f(x, jnp.int32(level)), truncated(own, level))


@pytest.mark.parametrize("axis", [1, -2])
def test_tiled_rows_are_joined_along_the_axis(axis):
  f = program("all_gather_planes", 4, axis=axis, tiled=True)
  x = {"a": X["a"], "none": X["none"]}
  expected = jax.tree.map(
    lambda a: np.concatenate(list(a), axis=axis), truncated(x, 1)
  )
  same_bits(f(x, jnp.int32(1)), expected)


@OPS
def test_one_program_serves_every_level(op):
  f = program(op, 4)
  f(X, jnp.int32(0))
  levels = [jnp.int32(level) for level in LEVELS]
  before = compilations()
  trees = [f(X, level) for level in levels]
  assert compilations() == before
  errors = [np.abs(t["b"] - trees[-1]["b"]).max() for t in trees]
  assert errors[0] > errors[1] > errors[2] > errors[3] == 0


@OPS
def test_a_level_sends_only_its_own_bytes_as_words_in_one_collective(op):
  # A gather sends to 3 others; a sum sends 2 (4 - 1) / 4.
  times = {"all_gather_planes": 3, "broadcast_planes": 1.5}[op]
  f = program(op, 4)
  compiled = f.lower(X, jnp.int32(0)).compile()
  own = jax.tree.map(lambda a: a[0], X)
  for level in LEVELS:
    said = wire.payload_bytes(codecs.truncate(bytes=level + 1), own)
    assert said == (level + 1) * (8 * 14 + 4)
    traced = wire.step_bytes(f, X, jnp.int32(0), branch=level)
    real = wire.compiled_bytes(compiled, branch=level)
    assert traced.total_bytes == real.total_bytes == times * said
    for ledger in (traced, real):
      assert [move.dtype for move in ledger.moves] == ["uint8"]


@OPS
def test_the_bits_are_equal_on_all_workers(op):
  assert len(copies(program(op, 4)(X, jnp.int32(1))["a"])) == 1


UNCOMPRESSED = {
  "all_gather_planes": lambda x: lax.all_gather(x, "data", to="invarying"),
  "broadcast_planes": lambda x: lax.psum(
    jnp.where(lax.axis_index("data") == 0, x, 0.0), "data"
  ),
}


@OPS
def test_the_gradient_is_the_uncompressed_collectives(op):
  def grads(f):
    def local(x):
      return jax.grad(lambda x: jnp.sum(jnp.sin(jnp.float32(2) * f(x))))(x)[
        None
      ]

    return run(local, np.ones((4, 3), np.float32), 4, P("data"))

  exact = lambda x: getattr(collectives, op)(x, "data", 3)
  np.testing.assert_allclose(grads(exact), grads(UNCOMPRESSED[op]))
  assert np.abs(grads(exact)).max() > 0
  # At other levels it is the same gradient, at the truncated elements.
  one_byte = lambda x: getattr(collectives, op)(x, "data", 0)
  halves = lambda x: UNCOMPRESSED[op](x) - jnp.float32(0.5)
  np.testing.assert_allclose(grads(one_byte), grads(halves))


@OPS
def test_a_level_that_differs_between_workers_is_an_error(op):
  collective = getattr(collectives, op)
  with pytest.raises(ValueError, match="`level` must be equal on all workers"):
    run(lambda x: collective(x, "data", lax.axis_index("data")), X, 4)


@OPS
@pytest.mark.parametrize(
  ("x", "level", "error", "message"),
  [
    (X, 4, ValueError, r"`level` must be in \[0, 3\], got 4"),
    (X, 1.0, TypeError, r"`level` must be an integer scalar"),
    (
      {"w": jnp.ones((4, 2), jnp.bfloat16)},
      1,
      TypeError,
      r"`x/w` must be a float32 array, got bfloat16\[2\]",
    ),
    (jnp.ones((4, 2), jnp.int32), 1, TypeError, r"`x` must be a float32 array"),
  ],
)
def test_bad_arguments_are_named(op, x, level, error, message):
  with pytest.raises(error, match=message):
    run(lambda x: getattr(collectives, op)(x, "data", level), x, 4)


def test_a_source_that_is_no_worker_is_named():
  with pytest.raises(ValueError, match=r"`source` must be .* in \[0, 3\]"):
    run(lambda x: collectives.broadcast_planes(x, "data", 0, source=4), X, 4)


def test_under_pmap_workers_agree_instead_of_waiting_for_ever():
  f = jax.pmap(
    lambda x, level: collectives.all_gather_planes(x, "data", level),
    axis_name="data",
    devices=jax.devices()[:4],
  )
  y = np.asarray(f(X["a"], jnp.array([0, 2, 1, 0])))
  same_bits(y[0], truncated(X["a"], 2))


# Weights that live in shards, are gathered at the level of their group, and
# are updated where they live.
CONTROLLER = controllers.awp(threshold=0.0, interval=3)
TX = optax.chain(optax.add_decayed_weights(0.1), optax.sgd(0.05, momentum=0.9))
RNG = np.random.default_rng(0)
PARAMS = {
  name: {"kernel": RNG.normal(0, 0.3, shape).astype(np.float32)}
  for name, shape in {"one": (8, 16), "two": (16, 4)}.items()
}
GROUPS = controllers.group_by(PARAMS, [("(.*)/", r"\1")])
INPUTS = RNG.normal(size=(20, 32, 8)).astype(np.float32)
TARGETS = np.tanh(INPUTS[..., :4])


def loss(params, x, y):
  hidden = jnp.tanh(x @ params["one"]["kernel"])
  return jnp.mean((hidden @ params["two"]["kernel"] - y) ** 2)


def sharded_step():
  def norms(params):
    squares = jnp.square(controllers.group_norms(params, GROUPS))
    return jnp.sqrt(lax.psum(squares, "data"))

  def gather(part, level):
    return collectives.all_gather_planes(part, "data", level, tiled=True)

  def init(params):
    return params, TX.init(params), CONTROLLER.init(norms(params))

  def step(state, x, y):
    params, opt_state, control = state
    levels = CONTROLLER.level(control)
    parts = GROUPS.split(params)
    parts = [gather(p, levels[i]) for i, p in enumerate(parts)]
    grads = jax.grad(lambda parts: loss(GROUPS.merge(parts, params), x, y))(
      to_varying(parts, "data")
    )
    grads = GROUPS.merge(
      [
        [lax.psum_scatter(g, "data", tiled=True) / 4 for g in part]
        for part in grads
      ],
      params,
    )
    updates, opt_state = TX.update(grads, opt_state, params)
    params = optax.apply_updates(params, updates)
    return params, opt_state, CONTROLLER.update(norms(params), control)

  specs = (P("data"), P("data"), P())
  return (
    bind(init, 4, out_specs=specs),
    bind(step, 4, (specs, P("data"), P("data")), specs),
  )


def whole_step():
  """The same on one device."""
  norms = lambda params: controllers.group_norms(params, GROUPS)

  def init(params):
    return params, TX.init(params), CONTROLLER.init(norms(params))

  @jax.jit
  def move(state, seen, x, y):
    params, opt_state, control = state
    grads = jax.grad(loss)(seen, x, y)
    updates, opt_state = TX.update(grads, opt_state, params)
    params = optax.apply_updates(params, updates)
    return params, opt_state, CONTROLLER.update(norms(params), control)

  def step(state, x, y):
    levels = CONTROLLER.level(state[2]).tolist()
    parts = zip(GROUPS.split(state[0]), levels, strict=True)
    seen = GROUPS.merge([truncated(*part) for part in parts], state[0])
    return move(state, seen, x, y)

  return init, step


def test_sharded_training_adapts_its_precision_without_compiling():
  init, step = sharded_step()
  init_whole, step_whole = whole_step()
  ours, theirs = init(PARAMS), init_whole(PARAMS)
  ours = step(ours, INPUTS[0], TARGETS[0])
  theirs = step_whole(theirs, INPUTS[0], TARGETS[0])
  batches = list(zip(INPUTS[1:], TARGETS[1:], strict=True))
  before = compilations()
  for x, y in batches:
    ours = step(ours, x, y)
  assert compilations() == before
  for x, y in batches:
    theirs = step_whole(theirs, x, y)
  told = [controllers.level_changes(s[2].history) for s in (ours, theirs)]
  assert told[0] == told[1]
  assert {s.level for s in told[0]} == {0, 1, 2, 3}
  jax.tree.map(
    lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), ours[0], theirs[0]
  )
