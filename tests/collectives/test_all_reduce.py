import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

from jaxmotion import codecs, collectives, make_key, wire
from jaxmotion.collectives import extend
from jaxmotion.core import (
  to_varying,
)
from tests.codecs.table import CODECS, KINDS
from tests.collectives.helpers import bind, copies, over, run
from tests.meshes import mesh_of

RNG = np.random.default_rng(0)


def tree(workers, size=700):
  return {
    "w": jnp.asarray(RNG.normal(size=(workers, size)).astype(np.float32)),
    "b": jnp.asarray(RNG.normal(size=(workers, 5)).astype(np.float32)),
  }


def reduce(x, codec=None, **options):
  """all_reduce with fresh state, as one worker calls it."""
  codec = codecs.identity() if codec is None else codec
  method = options.get("method")
  state = collectives.all_reduce_init(x, "data", codec, method=method)
  key = make_key(0, lax.axis_index("data"))
  y, _ = collectives.all_reduce(
    x, "data", codec, state=state, key=key, **options
  )
  return y


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_identity_is_the_uncompressed_collective_bit_for_bit(dtype):
  def both(x):
    theirs = lax.pmean(x, "data"), lax.psum(x, "data")
    return [reduce(x, op=op) for op in ("mean", "sum")], theirs

  ours, theirs = run(both, jax.tree.map(lambda a: a.astype(dtype), tree(4)), 4)
  for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
    # Only float16 is added up in float32.
    assert a.dtype == b.dtype
    assert np.asarray(a).tobytes() == np.asarray(b).tobytes()


@pytest.mark.parametrize("method", ["gather", "two_phase"])
def test_the_sum_is_the_mean_times_the_workers(method):
  call = functools.partial(reduce, codec=codecs.uniform(bits=8), method=method)
  total, mean = run(lambda x: (call(x, op="sum"), call(x)), tree(4), 4)
  for name in mean:
    np.testing.assert_allclose(total[name], 4 * mean[name], rtol=1e-6)


def test_no_tracer_outlives_the_trace():
  def loss(x):
    mean = reduce(x, codecs.uniform(bits=8), weight=2.0)
    return sum(jnp.sum(leaf**2) for leaf in jax.tree.leaves(mean))

  with jax.checking_leaks():
    jax.eval_shape(over(jax.grad(loss), 2, P("data")), tree(2))


@functools.cache
def program(name, method, workers=4):
  """x to its mean, and to what every worker decodes of its own."""
  codec = CODECS[name]

  def local(x):
    key = make_key(0, lax.axis_index("data")).fold_path("")
    state = to_varying(codec.init(x), "data")
    payload, _ = codec.encode(x, state, key)
    own = codec.decode(payload, x)
    return reduce(x, codec, method=method), own[None]

  return over(local, workers, (P(), P("data")))


@functools.cache
def compiled(name, method, workers=4):
  """What is run is what is counted."""
  return program(name, method, workers).lower(tree(workers)["w"]).compile()


# The tests of scatter and gather compile every codec; these all methods: of
# floats, of words, with memory, with a seed that is not summed, with keys.
COMPILED = ("identity", "int4", "topk_feedback", "random_k", "int8_stochastic")


@pytest.mark.parametrize(
  ("name", "workers"), [*((name, 4) for name in COMPILED), ("int4", 3)]
)
def test_the_mean_of_what_was_decoded_is_on_every_worker(name, workers):
  codec = CODECS[name]
  y, own = compiled(name, "gather", workers)(tree(workers)["w"])
  assert len(copies(y)) == 1
  if codec.summable and name != "identity":
    return  # a shared sample: compared in its own tests
  mean = np.asarray(own, np.float64).mean(0)
  np.testing.assert_allclose(y, mean, rtol=2e-6, atol=1e-6)


@pytest.mark.parametrize("name", KINDS)
def test_bytes_said_traced_and_compiled_are_equal(name):
  codec = CODECS[name]
  workers = 4
  x = tree(workers)["w"]
  whole = wire.payload_bytes(codec, x[0])
  part = wire.payload_bytes(codec, extend.part_like(codec, x[0], workers))
  said = dict(gather=(workers - 1) * whole, two_phase=2 * (workers - 1) * part)
  if codec.summable:
    words = 4 if name.startswith("random_k") else 0  # seeds are not summed
    said["two_phase"] = 2 * (workers - 1) / workers * (whole - words)
    said["gather"] = said["two_phase"]
  for method in said if name in COMPILED else ["two_phase"]:
    traced = wire.step_bytes(program(name, method), x).total_bytes
    assert traced == said[method]
    if name in COMPILED:
      read = wire.compiled_bytes(compiled(name, method))
      assert read.total_bytes == traced


@pytest.mark.parametrize("workers", [3, 8])
def test_two_phases_add_one_quantization_for_any_number_of_workers(workers):
  # A matrix whose rows workers do not divide stays one.
  matrix = RNG.normal(size=(workers, 128, 64)).astype(np.float32)
  assert extend.row_like(matrix[0], 3).shape == (43, 64)
  x = tree(workers) | {"m": matrix}
  codec = codecs.uniform(bits=8, block=64)
  y = run(lambda x: reduce(x, codec, method="two_phase"), x, workers)
  for name in x:
    exact = np.asarray(x[name], np.float64).mean(0)
    bound = np.abs(x[name]).max() / 127 / 2 + np.abs(exact).max() / 127 / 2
    assert y[name].shape == exact.shape and len(copies(y[name])) == 1
    assert np.abs(y[name] - exact).max() <= bound * 1.01


def test_methods_are_chosen_by_the_number_of_workers():
  codec = codecs.uniform(bits=8)

  def ops(workers):
    x = tree(workers, size=64 * workers)["w"]
    return {m.op for m in step_ledger(codec, x, workers).moves}

  # Between two, hosts gather by way of a sum.
  assert ops(2) in ({"all_gather"}, {"all_reduce"})
  assert ops(3) == {"all_to_all", "all_gather"}


def step_ledger(codec, x, workers=4, method=None):
  program = over(lambda x: reduce(x, codec, method=method), workers)
  return wire.step_bytes(program, x)


def test_only_words_of_a_lossy_codec_travel_in_one_collective_a_phase():
  x = {f"leaf{i}": jnp.ones((4, 1000 + i)) for i in range(3)}
  codec = codecs.feedback(codecs.uniform(bits=4))
  for method, phases in dict(gather=1, two_phase=2).items():
    moves = step_ledger(codec, x, 4, method).moves
    assert {m.dtype for m in moves} == {"uint32"}
    assert sum(m.count for m in moves) == phases


def test_the_gradient_is_the_uncompressed_collectives():
  def grads_and_sum(sum_of):
    def local(x):
      grad = jax.grad(lambda x: (sum_of(x) ** 3).sum())(x)
      return grad[None], sum_of(x)

    return run(local, tree(4, 70)["w"], 4, (P("data"), P()))

  codec = codecs.topk(density=0.1)
  ours, y = grads_and_sum(lambda x: reduce(x, codec, op="sum"))
  uncompressed, s = grads_and_sum(lambda x: lax.psum(x, "data"))
  # d/dx_r of sum(s^3) with s = psum(x) is 3 s^2 on every worker, times the
  # workers that each hold a copy of the loss, as for the uncompressed psum.
  factor = np.median(np.asarray(uncompressed) / (3 * np.asarray(s) ** 2))
  np.testing.assert_allclose(ours, [factor * 3 * y**2] * 4, rtol=2e-4)


def test_wrong_states_and_leaves_are_named():
  codec = codecs.feedback(codecs.uniform(bits=4))
  whole = {"a": {"step": jnp.ones((2, 3), jnp.int32)}}
  for x, state, error, message in (
    (tree(2), [], ValueError, "`state` must be made for this codec"),
    (tree(2), None, ValueError, "`state` must be given for a codec that has"),
    (whole, None, TypeError, "`a/step` must be a floating-point"),
  ):
    call = functools.partial(
      collectives.all_reduce, axis_name="data", codec=codec, state=state
    )
    with pytest.raises(error, match=message):
      run(lambda x, call=call: call(x)[0], x, 2)


def test_works_over_two_axes_at_once_and_under_pmap():
  x, codec = tree(4)["w"], codecs.uniform(bits=8)
  grid = mesh_of(2, 2, names="ab")

  def mean_over(axes, x):
    return collectives.all_reduce(x, axes, codec)[0]

  local = lambda x: mean_over(("a", "b"), x[0])
  specs = dict(in_specs=P(("a", "b")), out_specs=P())
  y = jax.jit(jax.shard_map(local, mesh=grid, **specs))(x)
  local = functools.partial(mean_over, "data")
  rows = jax.pmap(local, axis_name="data", devices=jax.devices()[:4])(x)
  assert all(np.asarray(row).tobytes() == rows[0].tobytes() for row in rows)
  for found in (y, rows[0]):
    np.testing.assert_allclose(found, np.asarray(x).mean(0), atol=0.02)


@pytest.mark.parametrize(
  ("codec", "dtype", "method"),
  [
    (codecs.zero_value(capacity=1.0), "bfloat16", "gather"),
    (codecs.uniform(bits=8), "float16", "two_phase"),
    (codecs.feedback(codecs.zero_value(capacity=1.0)), "float16", "gather"),
    (codecs.identity(), "float16", None),
  ],
  ids=repr,
)
def test_narrow_gradients_are_summed_in_float32(codec, dtype, method):
  x = tree(4)["w"].astype(dtype)
  y = run(lambda x: reduce(x, codec, method=method), x, 4)
  assert y.dtype == dtype
  exact = np.asarray(x, np.float64).mean(0)
  eps = float(jnp.finfo(dtype).eps)
  step = 0.06 if isinstance(codec, codecs.uniform) else 0
  np.testing.assert_allclose(
    np.asarray(y, np.float64), exact, rtol=eps, atol=step + 1e-3 * eps
  )


def test_float16_gradients_near_the_greatest_float_stay_finite():
  codec = codecs.feedback(codecs.topk(density=0.25))

  def local(x):
    state = collectives.all_reduce_init(x, "data", codec)
    steps = []
    for _ in range(3):  # What waits in the memory grows beyond float16.
      y, state = collectives.all_reduce(x, "data", codec, state=state)
      steps.append(y)
    mean = reduce(x)
    share, _ = collectives.reduce_scatter(x, "data", op="mean")
    total = reduce(x, op="sum")
    return steps, mean, lax.pmax(jnp.max(share), "data"), total

  x = np.full((4, 1024), 65504, np.float16)
  steps, mean, shares, total = run(local, x, 4)
  assert np.isfinite(np.asarray(steps, np.float32)).all()
  np.testing.assert_array_equal(mean, x[0])
  assert float(shares) == 65504
  np.testing.assert_array_equal(total, x[0])
  x[2, 5] = np.inf
  steps, mean, _, _ = run(local, x, 4)
  assert np.isinf(steps[0][5]) and np.isinf(mean[5])


@pytest.mark.parametrize("workers", [1, 40])
def test_payloads_of_any_number_of_workers_are_added(workers):
  codec = codecs.uniform(bits=8)
  x = np.random.default_rng(0).normal(size=(workers, 33)).astype(np.float32)

  @jax.jit
  def sums(x):
    payloads, _ = jax.vmap(codec.encode)(x)
    decoded = jax.vmap(lambda p: codec.decode(p, x[0]))(payloads)
    return codec.sum_decoded(payloads, x[0]), decoded

  total, decoded = sums(x)
  exact = np.asarray(decoded, np.float64).sum(0)
  np.testing.assert_allclose(total, exact, rtol=1e-5, atol=1e-5)


def test_empty_and_scalar_leaves_are_reduced_too():
  x = {
    "none": jnp.zeros((3, 0)),
    "one": jnp.arange(3.0),
    "w": jnp.ones((3, 400)),
  }
  codec = codecs.feedback(codecs.uniform(bits=8))
  methods = "gather", "two_phase"
  for y in run(lambda x: [reduce(x, codec, method=m) for m in methods], x, 3):
    assert y["none"].shape == (0,)
    np.testing.assert_allclose(y["one"], 1.0, rtol=2.0**-7)
    np.testing.assert_allclose(y["w"], 1.0, rtol=2.0**-14)


@pytest.mark.parametrize(("place", "workers"), [(0, 2), (1, 3), (3, 2)])
def test_empty_leaves_stand_beside_sums_that_are_sent_in_halves(place, workers):
  large = jax.ShapeDtypeStruct((1 << 20,), "float32")
  leaves = [large, large, large]
  leaves.insert(place, jax.ShapeDtypeStruct((0, 3), "float32"))
  program = bind(
    lambda x: collectives.all_reduce(x, "data")[0], workers, in_specs=P()
  )
  shapes = [a.shape for a in jax.eval_shape(program, leaves)]
  assert shapes == [a.shape for a in leaves]
  sent = wire.step_bytes(program, leaves).total_bytes
  assert sent == 2 * (workers - 1) / workers * 3 * 4 * large.size


def test_a_mean_is_rounded_by_other_random_bits_than_its_terms():
  # A quarter of all elements rounds up. With the bits of the first rounding in
  # the second, 0.31 of those would that stand where they stood: the first of 16
  # planes, in worker 0's half.
  x = np.full((2, 256, 512), 0.25, np.float32)
  x[:, :, 0] = 1.0  # The scale of a block.
  codec = codecs.uniform(bits=2, rounding="stochastic", block=512)
  y = run(lambda x: reduce(x, codec, method="two_phase"), jnp.asarray(x), 2)
  assert np.asarray(y)[:8, 1:].mean() == pytest.approx(0.25, abs=0.03)


@pytest.mark.parametrize("x", [{}, {"a": np.zeros((4, 0), np.float32)}])
def test_nothing_to_reduce_is_nothing_sent(x):
  assert step_ledger(codecs.identity(), x).total_bytes == 0
  codec = codecs.feedback(codecs.uniform(bits=8))
  one = jax.tree.map(lambda a: a[0], x)
  scales = 3 * wire.payload_bytes(codec, one)
  assert step_ledger(codec, x).total_bytes == scales


@dataclasses.dataclass(frozen=True)
class last_array(codecs.Codec):
  """Remembers the array that it encoded last."""

  def init(self, like):
    return jnp.zeros(like.shape, like.dtype)

  def encode(self, x, state=(), key=None):
    return lax.bitcast_convert_type(x, jnp.uint32), x

  def decode(self, payload, like):
    return lax.bitcast_convert_type(payload, jnp.float32).astype(like.dtype)


@pytest.mark.parametrize("method", ["gather", "two_phase"])
def test_fresh_state_is_of_the_dtype_that_is_encoded(method):
  codec = last_array()

  def local(x):
    call = functools.partial(
      collectives.all_reduce, x, "data", codec, method=method
    )
    state = collectives.all_reduce_init(x, "data", codec, method=method)
    _, state = call(state=state)
    return call(state=state)[0]

  like = jax.ShapeDtypeStruct((4, 512), jnp.bfloat16)
  assert jax.eval_shape(over(local, 4), like).dtype == jnp.bfloat16
