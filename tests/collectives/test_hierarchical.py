import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import Mesh, PartitionSpec as P

from jaxmotion import HostAxes, codecs, collectives, make_key, state_specs, wire
from jaxmotion.core import pack_worker, unpack_worker
from tests.collectives.helpers import copies

HOSTS, DEVICES = 2, 4
WORKERS = HOSTS * DEVICES
AXES = HostAxes("host", "device")
BOTH = AXES.names
MESH = Mesh(np.array(jax.devices()[:WORKERS]).reshape(HOSTS, DEVICES), BOTH)
RNG = np.random.default_rng(0)
# A matrix whose rows the devices divide, one too small, one undivided.
X = {
  "dense": {
    "kernel": RNG.normal(size=(WORKERS, 64, 33)).astype(np.float32),
    "bias": RNG.normal(size=(WORKERS, 5)).astype(np.float32),
  },
  "odd": RNG.normal(size=(WORKERS, 13, 77)).astype(np.float32),
}
INT8 = codecs.uniform(bits=8, block=64)
STOCHASTIC = codecs.uniform(bits=8, block=64, rounding="stochastic")


def over_mesh(fn, *in_specs, out_specs=None):
  """fn over the mesh, jitted; arguments are split over all workers."""
  return jax.jit(
    jax.shard_map(
      fn,
      mesh=MESH,
      in_specs=in_specs or P(BOTH),
      out_specs=P() if out_specs is None else out_specs,
    )
  )


def reducer(codec=None, axes=AXES, **options):
  """A program over the mesh: trees (WORKERS, ...) to their mean."""

  def local(x):
    x = jax.tree.map(lambda a: a[0], x)
    init = collectives.all_reduce_init
    state = init(x, axes, codec or codecs.identity())
    key = make_key(0, lax.axis_index(BOTH))
    return collectives.all_reduce(
      x, axes, codec, state=state, key=key, **options
    )[0]

  return over_mesh(local)


def exact(x=X):
  return jax.tree.map(lambda a: np.asarray(a, np.float64).mean(0), x)


def assert_close(y, expected, tolerance):
  """Within the tolerance, and of the same bits on every worker."""
  jax.tree.map(
    lambda a, e: np.testing.assert_allclose(a, e, rtol=0, atol=tolerance),
    y,
    expected,
  )
  assert all(len(copies(a)) == 1 for a in jax.tree.leaves(y))


@pytest.mark.parametrize("op", ["mean", "sum"])
def test_identity_is_the_uncompressed_mean_but_for_the_order_of_the_sum(op):
  reference_op = {"mean": lax.pmean, "sum": lax.psum}[op]
  theirs = over_mesh(
    lambda x: reference_op(jax.tree.map(lambda a: a[0], x), BOTH)
  )(X)
  ours = reducer(op=op)(X)
  for a, b, x in zip(*map(jax.tree.leaves, (ours, theirs, X)), strict=True):
    assert len(copies(a)) == 1
    bound = 2 * WORKERS * np.finfo(np.float32).eps * np.abs(x).mean(0)
    bound = bound * WORKERS if op == "sum" else bound
    assert (np.abs(np.asarray(a) - np.asarray(b)) <= bound).all()


def step(x, bits=8):
  """Half a quantization step of a host's mean, and a little more."""
  most = max(float(np.abs(a).max()) for a in jax.tree.leaves(x))
  return 1.01 * most / (2 ** (bits - 1) - 1) / 2


@pytest.mark.parametrize(
  ("codec", "steps", "method"),
  [
    (STOCHASTIC, 2, "two_phase"),
    (codecs.feedback(INT8), 1, "two_phase"),
    # Joins shards with small leaves, which stay whole.
    (codecs.buckets(STOCHASTIC), 2, "two_phase"),
    (
      codecs.rules(
        [("bias$", codecs.identity()), ("kernel$", STOCHASTIC), ("odd", INT8)]
      ),
      2,
      "gather",
    ),
  ],
  ids=repr,
)
def test_lossy_codecs_come_as_close_as_they_say(codec, steps, method):
  init = collectives.all_reduce_init

  def local(x):
    x = jax.tree.map(lambda a: a[0], x)
    return collectives.all_reduce(
      x,
      AXES,
      codec,
      state=init(x, AXES, codec, method=method),
      key=make_key(0, lax.axis_index(BOTH)),
      method=method,
    )[0]

  phases = 2 if method == "two_phase" else 1
  assert_close(over_mesh(local)(X), exact(), phases * steps * step(X))


def test_rules_see_the_paths_of_the_leaves():
  codec = codecs.rules([("bias", INT8), ("dense/", INT8), ("nothing", INT8)])
  with pytest.raises(ValueError, match="got 'odd', which matches none of"):
    reducer(codec)(X)


def test_devices_round_independently():
  # The same values on all: only the keys differ.
  x = jnp.full((WORKERS, DEVICES * 64), 0.3).at[:, ::64].set(1.0)
  y = np.asarray(reducer(STOCHASTIC)(x)).reshape(DEVICES, 64)
  assert len({row.tobytes() for row in y}) == DEVICES


@pytest.mark.parametrize(
  ("codec", "dtype"),
  [(codecs.identity(), "float16"), (INT8, "bfloat16")],
  ids=repr,
)
def test_narrow_gradients_are_summed_in_float32(codec, dtype):
  x = X["odd"].astype(jnp.dtype(dtype))
  y = reducer(codec)(x)
  assert y.dtype == dtype
  eps = float(jnp.finfo(dtype).eps)
  mean = np.asarray(x, np.float64).mean(0)
  quantum = 0 if codec == codecs.identity() else step(X)
  # The host's mean is rounded once, and so is the result.
  most = np.abs(mean).max() + 1
  np.testing.assert_allclose(
    np.asarray(y, np.float64), mean, rtol=0, atol=quantum + 2 * eps * most
  )


@pytest.mark.parametrize("codec", [codecs.identity(), INT8], ids=repr)
def test_weights_are_exact_shares_over_both_axes(codec):
  w = np.array([1.0, 0.0, 2.0, 5.0, 3.0, 1.0, 0.5, 4.0], np.float32)

  def local(x, w):
    x = jax.tree.map(lambda a: a[0], x)
    return collectives.all_reduce(x, AXES, codec, weight=w[0])[0]

  y = over_mesh(local, P(BOTH), P(BOTH))(X, w)
  share = w.astype(np.float64) / w.sum()
  expected = jax.tree.map(lambda a: np.tensordot(share, a, 1), X)
  tolerance = 1e-6 if codec == codecs.identity() else 2 * step(X)
  assert_close(y, expected, tolerance)


@pytest.mark.parametrize(
  "codec", [codecs.identity(), codecs.uniform(bits=8, block=32)], ids=repr
)
def test_a_device_sends_its_shard_between_hosts(codec):
  size = DEVICES * 512
  x = jnp.ones((WORKERS, size))
  flat = over_mesh(
    lambda x: lax.pmean(  # only types the mean as equal on all devices
      collectives.all_reduce(x[0], "host", codec, method="gather")[0], "device"
    )
  )
  ours = reducer(codec)

  def between(program):
    return wire.step_bytes(program, x).per_axis()[("host",)]

  assert between(ours) == between(flat) / DEVICES
  program = ours.lower(x).compile()
  ledger = wire.compiled_bytes(program)
  assert ledger.total_bytes == wire.step_bytes(ours, x).total_bytes
  # Groups of devices that are not neighbors are the hosts.
  crossing = wire.step_bytes(ours, x).select(axes=("host",))
  assert {m.workers for m in crossing.moves} == {HOSTS}
  if codec != codecs.identity():
    assert {m.dtype for m in crossing.moves} == {"uint32"}


def test_rows_stay_together():
  # One scale a row: a shard that mixed rows would have other scales.
  x = np.ones((WORKERS, DEVICES * 8, 32), np.float32)
  x *= 2.0 ** np.arange(DEVICES * 8, dtype=np.float32)[:, None]
  y = reducer(codecs.uniform(bits=2, block=32))(x)
  np.testing.assert_array_equal(y, x[0])


def test_error_memory_is_a_shards_and_sends_everything_in_the_end():
  codec = codecs.feedback(codecs.topk(density=0.1))
  init = collectives.all_reduce_init
  shapes = []

  def fresh(x):
    x = jax.tree.map(lambda a: a[0], x)
    return pack_worker(init(x, AXES, codec))

  def probe(x):
    shapes.append(jax.tree.map(jax.typeof, fresh(x)))
    return jnp.zeros(())

  jax.eval_shape(over_mesh(probe), X)
  specs = state_specs(shapes[0], BOTH)
  state = over_mesh(fresh, out_specs=specs)(X)

  def local(x, state):
    y, state = collectives.all_reduce(
      jax.tree.map(lambda a: a[0], x),
      AXES,
      codec,
      state=unpack_worker(state),
    )
    return y, pack_worker(state)

  program = over_mesh(local, P(BOTH), specs, out_specs=(P(), specs))
  sent = jax.tree.map(lambda a: np.zeros(a.shape[1:]), X)
  for _ in range(40):
    y, state = program(X, state)
    sent = jax.tree.map(lambda s, a: s + np.asarray(a, np.float64), sent, y)
  errors = jax.jit(jax.vmap(codec.error))
  memory = [errors(s.first) for s in state.value]
  bias, kernel, odd = map(np.asarray, memory)
  assert bias.shape == (WORKERS, 5)
  assert kernel.shape == (WORKERS, 64 // DEVICES, 33)
  assert odd.shape == (WORKERS, -(-13 * 77 // DEVICES))
  # What was sent and what the hosts still remember is what came in.
  left = kernel.reshape(HOSTS, 64, 33).mean(0)
  expected = 40 * exact()["dense"]["kernel"]
  np.testing.assert_allclose(
    sent["dense"]["kernel"] + left, expected, rtol=1e-4, atol=1e-4
  )
  assert len({row.tobytes() for row in kernel}) == WORKERS


def test_the_local_codec_is_used_within_the_host_only():
  ours = reducer(local_codec=codecs.cast("bfloat16"))
  y = ours(X)
  assert_close(y, exact(), 2 * 2.0**-8 * 4)
  ledger = wire.step_bytes(ours, X)
  moves = ledger.select(axes=("device",)).moves
  assert {m.dtype for m in moves if m.op != "all_reduce"} == {"uint16"}
  assert {m.dtype for m in ledger.select(axes=("host",)).moves} == {"float32"}


def test_a_local_codec_may_round_at_random_and_differ_by_leaf():
  local = codecs.rules([("kernel", STOCHASTIC), (".*", codecs.identity())])
  ours = reducer(INT8, local_codec=local)
  assert_close(ours(X), exact(), 5 * step(X))


def test_a_level_sends_only_its_own_bytes():
  levels = [
    codecs.uniform(bits=2, rounding="stochastic"),
    codecs.identity(),
  ]

  def local(x, level):
    x = jax.tree.map(lambda a: a[0], x)
    key = make_key(0, lax.axis_index(BOTH))
    return collectives.all_reduce(x, AXES, levels, level=level, key=key)[0]

  program = over_mesh(local, P(BOTH), P())
  assert_close(program(X, 1), exact(), 1e-6)
  assert np.abs(program(X, 0)["odd"] - exact()["odd"]).max() > 1e-2
  low, high = (
    wire.step_bytes(program, X, 0, branch=b).per_axis()[("host",)]
    for b in (0, 1)
  )
  assert low < high / 7


def test_the_gradient_is_the_uncompressed_collectives():
  def grads(reduce):
    def local(x):
      x = jax.tree.map(lambda a: a[0], x)
      g = jax.grad(
        lambda x: sum((a**2).sum() for a in jax.tree.leaves(reduce(x)))
      )(x)
      return jax.tree.map(lambda a: a[None], g)

    return over_mesh(local, out_specs=P(BOTH))(X)

  ours = grads(lambda x: collectives.all_reduce(x, AXES)[0])
  uncompressed = grads(lambda x: lax.pmean(x, BOTH))
  jax.tree.map(
    lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6),
    ours,
    uncompressed,
  )


@pytest.mark.parametrize(
  ("options", "message"),
  [
    (dict(op="max"), "`op` must be one of 'mean', 'sum', got 'max'"),
    (
      dict(axes=HostAxes("host", "local")),
      "`axis_name` must name an axis of the enclosing",
    ),
    (dict(level=1), "`level` must be given if `codec` is a sequence .* got 1"),
    (dict(weight=jnp.ones(3)), "`weight` must be a scalar"),
    (
      dict(local_codec=codecs.feedback(INT8)),
      "`local_codec` must be a codec without state, got feedback",
    ),
    (
      dict(local_codec=codecs.buckets(INT8)),
      "`local_codec` must encode every leaf by itself",
    ),
  ],
)
def test_bad_arguments_are_named(options, message):
  two = {"a": jnp.ones((WORKERS, 3)), "b": jnp.ones((WORKERS, 3))}
  with pytest.raises(ValueError, match=message):
    reducer(INT8, **options)(two)


def test_workers_of_all_hosts_agree_on_a_level():
  level = lambda: lax.axis_index("host") + 2 * lax.axis_index("device")
  most = over_mesh(lambda x: collectives.max_over_workers(level(), AXES))
  assert most(np.zeros(WORKERS)) == HOSTS - 1 + 2 * (DEVICES - 1)


def test_integer_leaves_are_named_by_their_path():
  x = {"a": {"step": jnp.ones((WORKERS, 3), jnp.int32)}}
  with pytest.raises(TypeError, match="`a/step` must be a floating-point"):
    reducer()(x)


def test_state_needs_both_axes_only_if_there_is_some():
  x = {"w": jnp.ones(1024)}
  init = collectives.all_reduce_init
  assert not jax.tree.leaves(init(x, AXES, INT8))
  with pytest.raises(ValueError, match="`axis_name` must name an axis"):
    init(x, AXES, codecs.feedback(INT8))


def test_levels_give_empty_leaves_one_type():
  levels = [
    codecs.microscaling(format="float8_e4m3fn"),
    codecs.random_k(density=0.3),
  ]
  tree = {"none": np.zeros((WORKERS, 0, 3), np.float32), "w": X["odd"]}

  def local(x, level):
    x = jax.tree.map(lambda a: a[0], x)
    key = make_key(0, lax.axis_index(BOTH))
    reduce = collectives.all_reduce
    return reduce(x, AXES, levels, level=level, key=key)[0]

  program = jax.shard_map(
    local, mesh=MESH, in_specs=(P(BOTH), P()), out_specs=P()
  )
  y = jax.eval_shape(program, tree, jnp.int32(0))
  assert y["none"].shape == (0, 3) and y["w"].shape == X["odd"].shape[1:]
