"""Gradients, errors and names of compressed functions."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.experimental import io_callback
from jax.sharding import PartitionSpec as P

from jaxmotion import codecs
from jaxmotion.memory import (
  calibrate_zero_value,
  compress_residuals,
  offload,
  recompute,
  residuals_of,
)
from jaxmotion.memory.residuals._traced import TracedFunction
from jaxmotion.memory.residuals.choose import make_options
from tests.memory.residuals.nets import (
  NAMES,
  distance,
  gradients,
  looped,
  make,
  normal,
  plain_gradients,
  plain_relu_gradients,
  relu_block,
  same,
  squared,
  stacked,
)

INT8 = codecs.uniform(bits=8, block=128)
INT4 = codecs.uniform(bits=4, block=64, rounding="stochastic")
# Two programs may fuse differently, and then add in another order. Which do so
# depends on the processor. Errors of codecs are a thousand times as large.
ORDER = 1e-6


@pytest.mark.parametrize("name", NAMES)
def test_lossless_gradients_are_those_of_plain_training(name):
  block, p, x = make(name)
  if name == "pool":  # It halves the image, so it is no loop's body.
    expected = gradients(squared(block), p, x)
    found = gradients(compress_residuals(squared(block)), p, x)
  else:
    expected = plain_gradients(name)
    loss = looped(compress_residuals(block))
    found = gradients(loss, stacked(p, 3), x)
  assert distance(expected, found) < ORDER


@pytest.mark.parametrize(
  ("name", "codec", "most"),
  [
    ("mlp", INT8, 0.02),
    ("attention", INT8, 0.02),
    ("conv", INT8, 0.02),
    ("mlp", INT4, 0.4),
  ],
)
def test_lossy_gradients_are_close_and_values_exact(name, codec, most):
  block, p, x = make(name)
  loss = looped(compress_residuals(block, codec))
  value, grads = gradients(loss, stacked(p, 3), x)
  expected, exact = plain_gradients(name)
  assert abs(value - expected) < 1e-6 * abs(expected)
  assert 0 < distance(exact, grads) < most


@pytest.mark.parametrize("name", ["mlp", "conv"])
def test_the_compiled_loop_needs_less_memory(name):
  block, p, x = make(name)
  p, x = stacked(p, 8), jnp.concatenate([x] * 4)

  def temp_bytes(loss):
    lowered = jax.jit(jax.grad(loss)).lower(p, x)
    return lowered.compile().memory_analysis().temp_size_in_bytes

  whole = temp_bytes(looped(block))
  lossless = temp_bytes(looped(compress_residuals(block)))
  eight = temp_bytes(looped(compress_residuals(block, INT8)))
  assert lossless < 0.8 * whole
  assert eight < 0.6 * lossless


def test_listed_bytes_are_those_that_are_saved():
  block, p, x = make("attention")
  found = residuals_of(block, p, x, codec=INT8)
  pullback = jax.eval_shape(
    lambda p, x: jax.vjp(compress_residuals(block, INT8), p, x)[1], p, x
  )
  saved = sum(a.size * a.dtype.itemsize for a in jax.tree.leaves(pullback))
  weights = sum(a.nbytes for a in jax.tree.leaves(p))
  assert sum(r.encoded_bytes for r in found) == saved - weights


def test_a_loop_inside_is_compressed():
  block, p, x = make("mlp")
  p = stacked(p, 3)
  found = gradients(compress_residuals(looped(block)), p, x)
  assert distance(plain_gradients("mlp"), found) < ORDER
  inside = residuals_of(looped(block), p, x)
  assert {r.repeats for r in inside if "scan_0/" in r.name} == {3}
  names = [r.name for r in inside]
  assert "dense/scan_0/dot_general_0" in names


def test_masks_are_not_recomputed_from_rounded_values():
  _, p, x = make("mlp")

  def loss(p, x):
    return jnp.sum(jax.nn.relu(x @ p["in"]) @ p["out"])

  exact = jax.grad(loss)(p, x)
  fn = compress_residuals(loss, INT8, params=(0, 1))
  found = jax.jit(jax.grad(fn))(p, x)
  # The mask and arguments are all that the gradient of p["in"] depends on.
  assert distance(exact["in"], found["in"]) < ORDER
  kinds = {r.kind for r in residuals_of(loss, p, x, codec=INT8)}
  assert "mask" in kinds


def test_masks_are_recomputed_with_the_matmul_they_follow_from():
  def block(w, x):
    return jax.nn.relu(x @ w[0])

  def first(w, x):
    return jax.nn.relu(x) @ w[0]

  w, x = normal(0, 2, 64, 64), normal(1, 128, 64)
  for fn, kinds in ((block, ["dense"]), (first, ["mask", "sparse"])):
    saved = residuals_of(fn, w, x, codec=INT8, memory_budget=0.0)
    assert sorted(r.kind for r in saved) == kinds
  loss = compress_residuals(first, INT8, memory_budget=0.0)
  exact, found = (
    jax.jit(jax.grad(lambda x, fn=fn: jnp.sum(fn(w, x))))(x)
    for fn in (first, loss)
  )
  assert same(exact, found)


def test_masks_follow_from_the_output_of_relu():
  _, p, x = make("mlp")

  def loss(p, x):
    return jnp.sum(jax.nn.relu(x @ p["in"]) @ p["out"])

  assert [r.kind for r in residuals_of(loss, p, x, params=(0, 1))] == ["sparse"]


def test_parameters_are_not_saved():
  def fn(w, x):
    return jnp.sum(jnp.tanh(x @ w.astype(jnp.bfloat16).astype(jnp.float32)))

  w, x = normal(0, 64, 64), normal(1, 128, 64)
  assert not any(r.shape == (64, 64) for r in residuals_of(fn, w, x))
  saved = residuals_of(fn, w, x, params=(1,))
  assert not any(r.shape == (128, 64) and "/1" in r.name for r in saved)


def test_everything_is_recomputed_on_request():
  block, p, x = make("mlp")
  saved = residuals_of(block, p, x, memory_budget=0.0)
  assert [(r.shape, r.kind) for r in saved] == [(x.shape, "dense")]
  loss = looped(compress_residuals(block, memory_budget=0.0))
  (_, a), (_, b) = plain_gradients("mlp"), gradients(loss, stacked(p, 3), x)
  assert distance(a, b) < 1e-6


def test_the_first_matching_rule_decides():
  block, p, x = make("mlp")
  names = [r.name for r in residuals_of(block, p, x)]
  assert "dense/dot_general_0" in names
  rules = [
    ("dot_general_0", recompute()),
    ("tanh|square|dot_general_1", codecs.cast("bfloat16")),
    ("dense", offload(INT8)),
  ]
  saved = {r.name: r for r in residuals_of(block, p, x, codec=rules)}
  assert "dense/dot_general_0" not in saved
  (narrow,) = [r for r in saved.values() if r.codec == codecs.cast("bfloat16")]
  del saved[narrow.name]
  assert narrow.shape == x.shape and not narrow.on_host
  assert saved and all(r.on_host and r.codec == INT8 for r in saved.values())
  value, grads = gradients(squared(compress_residuals(block, rules)), p, x)
  expected, exact = gradients(squared(block), p, x)
  assert value == expected and distance(exact, grads) < 0.02


def test_offloaded_residuals_are_exact():
  block, p, x = make("attention")
  loss = looped(compress_residuals(block, offload()))
  found = gradients(loss, stacked(p, 3), x)
  assert distance(plain_gradients("attention"), found) < 1e-6


def test_labels_name_residuals():
  def fn(w, x):
    h = checkpoint_name(x @ w, "hidden")
    return jnp.sum(jnp.sin(h))

  w, x = normal(0, 64, 64), normal(1, 64, 64)
  saved = residuals_of(fn, w, x, codec=[("hidden", INT8)], params=(0, 1))
  assert [(r.name, r.codec) for r in saved] == [("dense/hidden", INT8)]


def test_random_rounding_is_reproducible_and_differs_between_arrays():
  _, p, x = make("mlp")
  fn = compress_residuals(lambda w, x: jnp.sum(jnp.sin(x @ w)), INT4)
  grad = jax.jit(jax.grad(fn))
  assert same(grad(p["in"], x), grad(p["in"], x))
  assert not same(grad(p["in"], x), grad(p["in"], x + 1e-3))


class TestComposition:
  def check(self, fn, *args, argnums=0):
    grad = functools.partial(jax.grad, argnums=argnums)
    expected = jax.jit(grad(fn))(*args)
    assert same(expected, jax.jit(grad(compress_residuals(fn)))(*args))

  def test_vmap(self):
    block, p, x = make("attention")
    loss = squared(block)
    axes = (None, 0)
    expected = jax.jit(jax.vmap(jax.grad(loss), axes))(p, x[:, None])
    found = jax.vmap(jax.grad(compress_residuals(loss)), axes)
    assert distance(expected, jax.jit(found)(p, x[:, None])) < 1e-6

  def test_random_keys_integers_and_none(self):
    def loss(p, x, key, steps, nothing):
      keep = jax.random.bernoulli(key, 0.5, x.shape)
      y = jnp.where(keep, x @ p["in"] @ p["out"], 0)
      return jnp.sum(y**2) * steps

    _, p, x = make("mlp")
    self.check(loss, p, x, jax.random.key(0), 3, None)

  def test_narrow_floats(self):
    block, p, x = make("mlp")
    p, x = jax.tree.map(lambda a: a.astype("bfloat16"), (p, x))
    self.check(squared(block), p, x)

  def test_parameters_closed_over(self):
    _, p, x = make("mlp")

    def loss(wrap, p):
      return jnp.sum(wrap(lambda x: jnp.tanh(x @ p["in"]) @ p["out"])(x) ** 2)

    expected = jax.jit(jax.grad(functools.partial(loss, lambda f: f)))(p)
    wrap = functools.partial(compress_residuals, params=())
    found = jax.jit(jax.grad(functools.partial(loss, wrap)))(p)
    assert same(expected, found)

  def test_checkpoint_inside_and_outside(self):
    block, p, x = make("mlp")
    policy = jax.checkpoint_policies.dots_saveable
    inside = squared(jax.checkpoint(block, policy=policy))
    self.check(inside, p, x)
    outside = jax.checkpoint(compress_residuals(squared(block)))
    expected = jax.jit(jax.grad(squared(block)))(p, x)
    assert distance(expected, jax.jit(jax.grad(outside))(p, x)) < 1e-6

  def test_itself(self):
    block, p, x = make("conv")
    nested = compress_residuals(squared(compress_residuals(block, INT8)), INT8)
    once = compress_residuals(squared(block), INT8)
    a, b = (jax.jit(jax.grad(f))(p, x) for f in (nested, once))
    assert distance(a, b) < 0.03

  def test_shard_map(self):
    block, p, x = make("mlp")
    mesh = jax.make_mesh(
      (2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,)
    )

    def run(block):
      def local(p, x):
        return lax.psum(jnp.sum(block(p, x) ** 2), "data")

      sharded = jax.shard_map(
        local, mesh=mesh, in_specs=(P(), P("data")), out_specs=P()
      )
      return jax.jit(jax.grad(sharded))(p, x)

    for exact in (None, offload()):
      assert distance(run(block), run(compress_residuals(block, exact))) < 1e-6
    assert distance(run(block), run(compress_residuals(block, INT8))) < 0.03

  def test_without_a_gradient_nothing_changes(self):
    block, p, x = make("conv")
    assert same(jax.jit(block)(p, x), jax.jit(compress_residuals(block))(p, x))

  def test_results_of_other_dtypes(self):
    def fn(p, x):
      y = x @ p["in"]
      return jnp.sum(jnp.sin(y)), {"largest": jnp.argmax(y), "y": y}

    _, p, x = make("mlp")
    grad = functools.partial(jax.grad, has_aux=True)
    expected = jax.jit(grad(fn))(p, x)
    assert same(expected, jax.jit(grad(compress_residuals(fn)))(p, x))

  def test_linen(self):
    class Net(linen.Module):
      @linen.compact
      def __call__(self, x, train):
        x = linen.relu(linen.BatchNorm(use_running_average=not train)(x))
        return linen.Dense(3)(linen.Dropout(0.5, deterministic=not train)(x))

    net, x = Net(), normal(0, 128, 32)
    variables = jax.jit(net.init, static_argnums=2)(jax.random.key(0), x, False)

    def loss(params, stats, x, key):
      y, new = net.apply(
        {"params": params, "batch_stats": stats},
        x,
        True,
        mutable=["batch_stats"],
        rngs={"dropout": key},
      )
      return jnp.sum(y**2), new

    args = variables["params"], variables["batch_stats"], x, jax.random.key(1)
    grad = functools.partial(jax.grad, has_aux=True)
    expected = jax.jit(grad(loss))(*args)
    found = jax.jit(grad(compress_residuals(loss)))(*args)
    assert distance(expected, found) < ORDER

  def test_nnx(self):
    class Net(nnx.Module):
      def __init__(self, rngs):
        self.inner = nnx.Linear(16, 64, rngs=rngs)
        self.outer = nnx.Linear(64, 4, rngs=rngs)

      def __call__(self, x):
        return self.outer(nnx.gelu(self.inner(x)))

    graph, params = nnx.split(Net(nnx.Rngs(0)))

    def loss(params, x):
      return jnp.sum(nnx.merge(graph, params)(x) ** 2)

    self.check(loss, params, normal(0, 128, 16))


class TestZeroValue:
  @staticmethod
  def loss(p, x):
    y = jax.nn.relu(x @ p["in"] - 0.5)
    return jnp.sum((jax.nn.relu(y @ p["out"]) - 1.0) ** 2)

  @pytest.mark.parametrize(("capacity", "expected"), [(0.7, 0), (0.01, 2)])
  def test_results_are_exact_and_overflows_counted(self, capacity, expected):
    _, p, x = make("mlp")
    codec = codecs.zero_value(capacity=capacity)
    fn = compress_residuals(
      self.loss, codec, params=(0, 1), count_overflows=True
    )
    grad = jax.jit(jax.value_and_grad(fn, has_aux=True))
    (value, overflows), grads = grad(p, x)
    assert int(overflows) == expected
    plain = jax.jit(jax.value_and_grad(self.loss))
    assert same(plain(p, x), (value, grads))

  def test_overflows_are_exact_beside_rounded_residuals(self):
    _, p, x = make("mlp")
    p["last"] = normal(3, 16, 4)

    def loss(p, x):
      y = jax.nn.relu(jnp.sin(x @ p["in"]) @ p["out"] - 0.5)
      return jnp.sum(y @ p["last"])

    rules = [("sparse", codecs.zero_value(capacity=0.01)), ("dense", INT8)]
    fn = compress_residuals(loss, rules, params=(0, 1), count_overflows=True)
    grads, overflows = jax.jit(jax.grad(fn, has_aux=True))(p, x)
    assert int(overflows) == 1
    # The gradient of p["last"] depends on the overflowed residual alone.
    expected = jax.jit(jax.grad(loss))(p, x)
    assert distance(expected["last"], grads["last"]) < ORDER

  def test_inputs_to_recompute_overflows_from_are_saved_once_and_exactly(self):
    _, p, x = make("mlp")
    rules = [("sparse", codecs.zero_value(capacity=0.01)), ("dense", INT8)]
    saved = residuals_of(relu_block, p, x, codec=rules)
    assert [r.codec for r in saved if r.name == "dense/1"] == [None]

  @pytest.mark.parametrize(("capacity", "expected"), [(0.01, 3), (0.9, 0)])
  def test_overflows_in_a_loop(self, capacity, expected):
    _, p, x = make("mlp")
    fn = compress_residuals(
      looped(relu_block),
      codecs.zero_value(capacity=capacity),
      count_overflows=True,
    )
    grad = jax.jit(jax.value_and_grad(fn, has_aux=True))
    (value, overflows), grads = grad(stacked(p, 3), x)
    assert int(overflows) == expected
    assert distance(plain_relu_gradients(), (value, grads)) < ORDER


class TestErrors:
  def test_second_derivatives(self):
    fn = compress_residuals(lambda w, x: jnp.sum(jnp.tanh(x @ w)))
    w, x = normal(0, 8, 8), normal(1, 300, 8)
    with pytest.raises(NotImplementedError, match="no second derivatives"):
      jax.grad(lambda w: jnp.sum(jax.grad(fn)(w, x) ** 2))(w)

  def test_side_effects(self):
    def talks(p, x):
      io_callback(print, None, x[0, 0])
      return jnp.sum(x @ p)

    with pytest.raises(ValueError, match="`fn` must have no side effects"):
      compress_residuals(talks)(jnp.eye(2), jnp.eye(2))

  def test_arguments_without_a_gradient_in_reverse_mode(self):
    def halve(w, x):
      small = lax.while_loop(lambda x: x.max() > 1, lambda x: x / 2, x)
      return jnp.sum(w * small)

    match = "`fn` must be differentiable.*stop_gradient"
    with pytest.raises(ValueError, match=match):
      jax.grad(compress_residuals(halve))(jnp.ones(3), jnp.ones(3))

    def stopped(w, x):
      return halve(w, lax.stop_gradient(x))

    grad = jax.grad(compress_residuals(stopped))
    assert grad(jnp.ones(3), jnp.full(3, 4.0)).tolist() == [1, 1, 1]

  def test_rule_without_a_residual(self):
    block, p, x = make("mlp")
    fn = compress_residuals(block, [("hiden", INT8)])
    with pytest.raises(ValueError, match="got 'hiden', which matches none of"):
      fn(p, x)
    with pytest.raises(ValueError, match="got 'hiden', which matches none of"):
      residuals_of(block, p, x, codec=[("hiden", INT8)])

  def test_invalid_pattern(self):
    with pytest.raises(ValueError, match="`codec` must have regular"):
      compress_residuals(len, [("(", INT8)])

  def test_no_codec(self):
    with pytest.raises(TypeError, match="`codec` must be a Codec"):
      compress_residuals(len, 8)

  def test_codec_of_another_dtype(self):
    def loss(w, x):
      return jnp.sum(jax.nn.relu(x @ w) @ w)

    fn = compress_residuals(
      loss, lambda r: INT8 if r.kind == "mask" else codecs.cast("bfloat16")
    )
    with pytest.raises(TypeError, match="must be None for mask/"):
      fn(normal(0, 64, 64), normal(1, 64, 64))

  def test_codec_with_state(self):
    block, p, x = make("mlp")
    fn = compress_residuals(block, codecs.feedback(INT8))
    with pytest.raises(ValueError, match="must be a codec without state for"):
      fn(p, x)

  def test_positions_beyond_the_arguments(self):
    block, p, x = make("mlp")
    with pytest.raises(ValueError, match="`params` must be positions of the 2"):
      compress_residuals(block, params=2)(p, x)

  def test_budgets_that_are_no_bytes(self):
    with pytest.raises(ValueError, match="`memory_budget` must be .* got -1"):
      compress_residuals(len, memory_budget=-1)
    with pytest.raises(TypeError, match="`memory_budget` must be .*'half'"):
      residuals_of(jnp.sin, 1.0, memory_budget="half")


def test_names_do_not_depend_on_the_run():
  block, p, x = make("conv")
  names = [[r.name for r in residuals_of(block, p, x)] for _ in range(2)]
  assert names[0] == names[1] and len(set(names[0])) == len(names[0])


def test_evaluating_the_traced_function_changes_nothing():
  """Tracing may happen any number of times: it must have no side effects."""
  block, p, x = make("mlp")
  options = make_options(None)
  traced = TracedFunction(looped(block), (stacked(p, 3), x), 0, options)
  before = traced.saved_residuals()
  for _ in range(2):
    jax.eval_shape(traced._evaluate, *traced.given.arrays)
  assert traced.saved_residuals() == before
  assert any("scan_0/" in r.name for r in before)


def loss(p, x):
  y = jax.nn.relu(x @ p["in"] - 1.0)
  return jnp.sum((y @ p["out"]) ** 2)


def test_measured_batches_do_not_overflow_and_others_are_exact():
  _, p, x = make("mlp")
  rules = calibrate_zero_value(loss, [(p, x), (p, x[::-1])], params=(0, 1))
  ((_, codec),) = rules
  y = np.asarray(jax.nn.relu(x @ p["in"] - 1.0)).reshape(-1, 1024)
  fullest = float((y != 0).mean(axis=1).max())
  assert codec == codecs.zero_value(capacity=1.05 * fullest)
  fn = compress_residuals(loss, rules, params=(0, 1), count_overflows=True)
  grad = jax.jit(jax.value_and_grad(fn, has_aux=True))
  plain = jax.jit(jax.value_and_grad(loss))
  for scale, overflows in ((1.0, 0), (5.0, 1)):
    (value, count), grads = grad(p, scale * x)
    assert int(count) == overflows
    assert same(plain(p, scale * x), (value, grads))


def test_the_capacity_of_a_loop_fits_its_fullest_iteration():
  _, p, x = make("mlp")
  rules = calibrate_zero_value(looped(relu_block), [(stacked(p, 3), x)])
  assert [p for p, _ in rules] == ["^sparse/scan_0/custom_jvp_call_0$"]
  fn = compress_residuals(looped(relu_block), rules, count_overflows=True)
  grad = jax.jit(jax.grad(fn, has_aux=True))
  assert int(grad(stacked(p, 3), x)[1]) == 0


def test_bad_arguments_are_named():
  with pytest.raises(ValueError, match="`batches` must hold"):
    calibrate_zero_value(loss, [])
