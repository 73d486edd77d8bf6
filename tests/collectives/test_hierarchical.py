import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

from jaxmotion import HostAxes, codecs, collectives, make_key, state_specs, wire
from jaxmotion.core import eval_shape_in_map, pack_worker, unpack_worker
from tests.collectives.helpers import copies
from tests.meshes import mesh_of

HOSTS, DEVICES = 2, 4
WORKERS = HOSTS * DEVICES
AXES = HostAxes("host", "device")
BOTH = AXES.names
SAME = P()
MESH = mesh_of(HOSTS, DEVICES, names=BOTH)
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


def over_mesh(fn, *in_specs, out_specs=SAME):
  """fn over the mesh, jitted; arguments are split over all workers."""
  specs = dict(in_specs=in_specs or P(BOTH), out_specs=out_specs)
  return jax.jit(jax.shard_map(fn, mesh=MESH, **specs))


def first_rows(x):
  return jax.tree.map(lambda a: a[0], x)


def reducer(codec=None, axes=AXES, method=None, **options):
  """A program over the mesh: trees (WORKERS, ...) to their mean."""

  def local(x):
    x = first_rows(x)
    state = collectives.all_reduce_init(
      x, axes, codec or codecs.identity(), method=method
    )
    key = make_key(0, lax.axis_index(BOTH))
    return collectives.all_reduce(
      x, axes, codec, state=state, key=key, method=method, **options
    )[0]

  return over_mesh(local)


def exact():
  return jax.tree.map(lambda a: np.asarray(a, np.float64).mean(0), X)


def assert_close(y, expected, tolerance):
  """Within the tolerance, and of the same bits on every worker."""
  jax.tree.map(
    lambda a, e: np.testing.assert_allclose(a, e, rtol=0, atol=tolerance),
    y,
    expected,
  )
  assert all(len(copies(a)) == 1 for a in jax.tree.leaves(y))


def test_identity_is_the_uncompressed_mean_but_for_the_order_of_the_sum():
  for op, reference_op in dict(mean=lax.pmean, sum=lax.psum).items():
    theirs = over_mesh(lambda x, f=reference_op: f(first_rows(x), BOTH))(X)
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
  ("codec", "phases"),
  [
    # Joins shards with small leaves, which stay whole.
    (codecs.buckets(STOCHASTIC), 2),
    (
      codecs.rules(
        [("bias$", codecs.identity()), ("kernel$", STOCHASTIC), ("odd", INT8)]
      ),
      1,
    ),
  ],
  ids=repr,
)
def test_lossy_codecs_come_as_close_as_they_say(codec, phases):
  method = "two_phase" if phases == 2 else "gather"
  y = reducer(codec, method=method)(X)
  assert_close(y, exact(), phases * 2 * step(X))


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


def test_a_device_sends_its_shard_between_hosts():
  codec = codecs.uniform(bits=8, block=32)
  x = jnp.ones((WORKERS, DEVICES * 512))
  flat = over_mesh(
    lambda x: lax.pmean(  # only types the mean as equal on all devices
      collectives.all_reduce(x[0], "host", codec, method="gather")[0], "device"
    )
  )
  ours = reducer(codec)
  traced, of_all = wire.step_bytes(ours, x), wire.step_bytes(flat, x)
  crossing = traced.select(axes=("host",))
  assert crossing.total_bytes == of_all.per_axis()[("host",)] / DEVICES
  # Groups of devices that are not neighbors are the hosts.
  kinds = {(move.workers, move.dtype) for move in crossing.moves}
  assert kinds == {(HOSTS, "uint32")}
  compiled = wire.compiled_bytes(ours.lower(x).compile())
  assert compiled.total_bytes == traced.total_bytes


def test_rows_stay_together():
  # One scale a row: a shard that mixed rows would have other scales.
  x = np.ones((WORKERS, DEVICES * 8, 32), np.float32)
  x *= 2.0 ** np.arange(DEVICES * 8, dtype=np.float32)[:, None]
  y = reducer(codecs.uniform(bits=2, block=32))(x)
  np.testing.assert_array_equal(y, x[0])


def test_error_memory_is_a_shards_and_sends_everything_in_the_end():
  codec = codecs.feedback(codecs.topk(density=0.1))

  def fresh(x):
    return pack_worker(collectives.all_reduce_init(first_rows(x), AXES, codec))

  options = dict(mesh=MESH, in_specs=P(BOTH))
  specs = state_specs(eval_shape_in_map(fresh, options, X), BOTH)
  state = over_mesh(fresh, out_specs=specs)(X)

  def local(x, state):
    y, state = collectives.all_reduce(
      first_rows(x), AXES, codec, state=unpack_worker(state)
    )
    return y, pack_worker(state)

  program = over_mesh(local, P(BOTH), specs, out_specs=(P(), specs))
  sent = np.zeros((64, 33))
  for _ in range(8):
    y, state = program(X, state)
    sent += np.asarray(y["dense"]["kernel"], np.float64)
  errors = jax.jit(jax.vmap(codec.error))
  bias, kernel, odd = (np.asarray(errors(s.first)) for s in state.value)
  assert bias.shape == (WORKERS, 5)
  assert kernel.shape == (WORKERS, 64 // DEVICES, 33)
  assert odd.shape == (WORKERS, -(-13 * 77 // DEVICES))
  # What was sent and what the hosts still remember is what came in.
  left = kernel.reshape(HOSTS, 64, 33).mean(0)
  expected = 8 * exact()["dense"]["kernel"]
  np.testing.assert_allclose(sent + left, expected, rtol=1e-4, atol=1e-4)
  assert len({row.tobytes() for row in kernel}) == WORKERS


def test_the_local_codec_is_used_within_the_host_only():
  ours = reducer(local_codec=codecs.cast("bfloat16"))
  assert_close(ours(X), exact(), 2 * 2.0**-8 * 4)
  ledger = wire.step_bytes(ours, X)
  moves = ledger.select(axes=("device",)).moves
  assert {m.dtype for m in moves if m.op != "all_reduce"} == {"uint16"}
  assert {m.dtype for m in ledger.select(axes=("host",)).moves} == {"float32"}
  # It may round at random and differ by leaf.
  local = codecs.rules([("kernel", STOCHASTIC), (".*", codecs.identity())])
  assert_close(reducer(INT8, local_codec=local)(X), exact(), 5 * step(X))


def leveled(*levels):
  def local(x, level):
    reduce = collectives.all_reduce
    key = make_key(0, lax.axis_index(BOTH))
    return reduce(first_rows(x), AXES, levels, level=level, key=key)[0]

  return over_mesh(local, P(BOTH), P())


def test_a_level_sends_only_its_own_bytes():
  low = codecs.uniform(bits=2, rounding="stochastic")
  program = leveled(low, codecs.identity())
  assert_close(program(X, 1), exact(), 1e-6)
  assert np.abs(program(X, 0)["odd"] - exact()["odd"]).max() > 1e-2
  few, many = (
    wire.step_bytes(program, X, 0, branch=b).per_axis()[("host",)]
    for b in (0, 1)
  )
  assert few < many / 7


def test_levels_give_empty_leaves_one_type():
  float8 = codecs.microscaling(format="float8_e4m3fn")
  tree = {"none": np.zeros((WORKERS, 0, 3), np.float32), "w": X["odd"]}
  program = leveled(float8, codecs.random_k(density=0.3))
  y = jax.eval_shape(program, tree, jnp.int32(0))
  assert y["none"].shape == (0, 3) and y["w"].shape == X["odd"].shape[1:]


def test_the_gradient_is_the_uncompressed_collectives():
  def local(x):
    def grad(reduce):
      loss = lambda x: sum((a**2).sum() for a in jax.tree.leaves(reduce(x)))
      return jax.tree.map(lambda a: a[None], jax.grad(loss)(first_rows(x)))

    ours = grad(lambda x: collectives.all_reduce(x, AXES)[0])
    return ours, grad(lambda x: lax.pmean(x, BOTH))

  jax.tree.map(
    lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6),
    *over_mesh(local, out_specs=P(BOTH))(X),
  )


def test_bad_arguments_are_named():
  two = {"a": jnp.ones((WORKERS, 3)), "b": jnp.ones((WORKERS, 3))}
  for options, message in (
    (dict(axes=HostAxes("host", "local")), "`axis_name` must name an axis of"),
    (dict(level=1), "`level` must be given if `codec` is a sequence .* got 1"),
    (
      dict(local_codec=codecs.feedback(INT8)),
      "`local_codec` must be a codec without state, got feedback",
    ),
    (
      dict(local_codec=codecs.buckets(INT8)),
      "`local_codec` must encode every leaf by itself",
    ),
  ):
    with pytest.raises(ValueError, match=message):
      reducer(INT8, **options)(two)


def test_workers_of_all_hosts_agree_on_a_level():
  level = lambda: lax.axis_index("host") + 2 * lax.axis_index("device")
  most = over_mesh(lambda x: collectives.max_over_workers(level(), AXES))
  assert most(np.zeros(WORKERS)) == HOSTS - 1 + 2 * (DEVICES - 1)


def test_state_needs_both_axes_only_if_there_is_some():
  x = {"w": jnp.ones(1024)}
  init = collectives.all_reduce_init
  assert not jax.tree.leaves(init(x, AXES, INT8))
  with pytest.raises(ValueError, match="`axis_name` must name an axis"):
    init(x, AXES, codecs.feedback(INT8))
