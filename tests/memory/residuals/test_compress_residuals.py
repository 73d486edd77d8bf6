"""Gradients, errors and names of compressed functions."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.experimental import io_callback

from jaxmotion import codecs
from jaxmotion.memory import (
  calibrate_zero_value,
  compress_residuals,
  offload,
  recompute,
  residuals_of,
  save,
)
from tests.memory.residuals.nets import (
  NAMES,
  distance,
  gradients,
  looped,
  make,
  mlp_block,
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


@pytest.mark.optimized
def test_the_compiled_loop_needs_less_memory():
  block, p, x = make("mlp")
  p, x = stacked(p, 8), jnp.concatenate([x] * 4)

  def temp_bytes(loss):
    lowered = jax.jit(jax.grad(loss)).lower(p, x)
    return lowered.compile().memory_analysis().temp_size_in_bytes

  whole = temp_bytes(looped(block))
  lossless = temp_bytes(looped(compress_residuals(block)))
  eight = temp_bytes(looped(compress_residuals(block, INT8)))
  assert lossless < 0.8 * whole
  assert eight < 0.6 * lossless


@pytest.mark.parametrize(
  "name",
  [
    *(pytest.param(n, marks=pytest.mark.optimized) for n in NAMES[::2]),
    *NAMES[1::2],
  ],
)
def test_lossless_gradients_are_those_of_plain_training(name):
  block, p, x = make(name)
  if name == "pool":  # It halves the image, so it is no loop's body.
    expected = gradients(squared(block), p, x)
    found = gradients(compress_residuals(squared(block)), p, x)
  else:
    expected = plain_gradients(name)
    codec = offload() if name == "attention" else None
    loss = looped(compress_residuals(block, codec))
    found = gradients(loss, stacked(p, 3), x)
  assert distance(expected, found) < ORDER


@pytest.mark.parametrize(
  ("name", "codec", "most"), [("conv", INT8, 0.02), ("mlp", INT4, 0.4)]
)
def test_lossy_gradients_are_close_and_values_exact(name, codec, most):
  block, p, x = make(name)
  loss = looped(compress_residuals(block, codec))
  value, grads = gradients(loss, stacked(p, 3), x)
  expected, exact = plain_gradients(name)
  assert abs(value - expected) < 1e-6 * abs(expected)
  assert 0 < distance(exact, grads) < most


def test_listed_bytes_are_those_that_are_saved():
  block, p, x = make("attention")
  found = residuals_of(block, p, x, codec=INT8)
  fn = compress_residuals(block, INT8)
  pullback = jax.eval_shape(lambda p, x: jax.vjp(fn, p, x)[1], p, x)
  saved = sum(a.size * a.dtype.itemsize for a in jax.tree.leaves(pullback))
  weights = sum(a.nbytes for a in jax.tree.leaves(p))
  assert sum(r.encoded_bytes for r in found) == saved - weights


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
  # Without rounding, the mask follows from the output of the ReLU.
  exact = residuals_of(loss, p, x, params=(0, 1))
  assert [r.kind for r in exact] == ["sparse"]


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


def test_parameters_are_not_saved():
  def fn(w, x):
    return jnp.sum(jnp.tanh(x @ w.astype(jnp.bfloat16).astype(jnp.float32)))

  w, x = normal(0, 64, 64), normal(1, 128, 64)
  assert not any(r.shape == (64, 64) for r in residuals_of(fn, w, x))
  saved = residuals_of(fn, w, x, params=(1,))
  assert not any(r.shape == (128, 64) and "/1" in r.name for r in saved)


def test_the_first_matching_rule_decides():
  def fn(w, x):
    x = jnp.tanh(checkpoint_name(x @ w, "hidden") @ w)
    return jnp.sin(x @ w)

  w, x = normal(0, 64, 64), normal(1, 64, 64)
  bfloat16 = codecs.cast("bfloat16")
  rules = [
    ("dot_general_1", recompute()),
    ("hidden", bfloat16),
    ("tanh", save(offload())),
    ("dense", offload(INT8)),
  ]
  saved = residuals_of(fn, w, x, codec=rules)
  assert {r.name: (r.codec, r.on_host) for r in saved} == {
    "dense/1": (INT8, True),
    "dense/hidden": (bfloat16, False),
    "dense/tanh_0": (None, True),
    "dense/cos_0": (INT8, True),
  }
  value, grads = gradients(squared(compress_residuals(fn, rules)), w, x)
  expected, exact = gradients(squared(fn), w, x)
  assert value == expected and 0 < distance(exact, grads) < 0.02


def test_random_rounding_is_reproducible_and_differs_between_arrays():
  _, p, x = make("mlp")
  fn = compress_residuals(lambda w, x: jnp.sum(jnp.sin(x @ w)), INT4)
  grad = jax.jit(jax.grad(fn))
  assert same(grad(p["in"], x), grad(p["in"], x))
  assert not same(grad(p["in"], x), grad(p["in"], x + 1e-3))


def drop_elements(p, x, key, steps, nothing):
  keep = jax.random.bernoulli(key, 0.5, x.shape)
  y = jnp.where(keep, x @ p["in"] @ p["out"], 0)
  return jnp.sum(y**2) * steps, None


def return_other_dtypes(p, x):
  y = x @ p["in"]
  return jnp.sum(jnp.sin(y)), {"largest": jnp.argmax(y), "y": y}


def run_checkpoint(p, x):
  policy = jax.checkpoint_policies.dots_saveable
  return squared(jax.checkpoint(mlp_block, policy=policy))(p, x), None


COMPOSED = {
  "random keys, integers, None": (drop_elements, jax.random.key(0), 3, None),
  "results of other dtypes": (return_other_dtypes,),
  "checkpoint inside": (run_checkpoint,),
  "narrow floats": (lambda p, x: (squared(mlp_block)(p, x), None),),
}


@pytest.mark.parametrize("name", COMPOSED)
def test_gradients_have_the_bits_of_plain_training(name):
  fn, *more = COMPOSED[name]
  args = make("mlp")[1:]
  if name == "narrow floats":
    args = jax.tree.map(lambda a: a.astype("bfloat16"), args)
  grad = functools.partial(jax.grad, has_aux=True)
  both = fn, compress_residuals(fn)
  expected, found = (jax.jit(grad(f))(*args, *more) for f in both)
  assert same(expected, found)


def test_parameters_that_are_closed_over_have_gradients():
  _, p, x = make("mlp")

  def loss(wrap, p):
    return jnp.sum(wrap(lambda x: jnp.tanh(x @ p["in"]) @ p["out"])(x) ** 2)

  expected = jax.jit(jax.grad(functools.partial(loss, lambda f: f)))(p)
  wrap = functools.partial(compress_residuals, params=())
  assert same(expected, jax.jit(jax.grad(functools.partial(loss, wrap)))(p))


def test_a_compressed_function_is_compressed_again():
  block, p, x = make("mlp")
  nested = compress_residuals(squared(compress_residuals(block, INT8)), INT8)
  once = compress_residuals(squared(block), INT8)
  a, b = (jax.jit(jax.grad(f))(p, x) for f in (nested, once))
  assert distance(a, b) < 0.03


def run_counting(loss, codec, *args, params=(0, 1)):
  """Returns overflows, and value and gradients of a compressed function."""
  fn = compress_residuals(loss, codec, params=params, count_overflows=True)
  grad = jax.jit(jax.value_and_grad(fn, has_aux=True))
  (value, overflows), grads = grad(*args)
  return int(overflows), (value, grads)


class TestZeroValue:
  def test_results_are_exact_and_overflows_counted(self):
    def loss(p, x):
      y = jax.nn.relu(x @ p["in"] - 0.5)
      return jnp.sum((jax.nn.relu(y @ p["out"]) - 1.0) ** 2)

    _, p, x = make("mlp")
    expected = jax.jit(jax.value_and_grad(loss))(p, x)
    for capacity, expected_count in ((0.7, 0), (0.01, 2)):
      codec = codecs.zero_value(capacity=capacity)
      count, found = run_counting(loss, codec, p, x)
      assert count == expected_count and same(expected, found)

  def test_overflows_are_exact_beside_rounded_residuals(self):
    _, p, x = make("mlp")
    p["last"] = normal(3, 16, 4)

    def loss(p, x):
      y = jax.nn.relu(jnp.sin(x @ p["in"]) @ p["out"] - 0.5)
      return jnp.sum(y @ p["last"])

    rules = [("sparse", codecs.zero_value(capacity=0.01)), ("dense", INT8)]
    count, (_, grads) = run_counting(loss, rules, p, x)
    assert count == 1
    # The gradient of p["last"] depends on the overflowed residual alone.
    expected = jax.jit(jax.grad(loss))(p, x)
    assert distance(expected["last"], grads["last"]) < ORDER
    # The input that it is recomputed from is saved once, and exactly.
    saved = residuals_of(relu_block, p, x, codec=rules)
    assert [r.codec for r in saved if r.name == "dense/1"] == [None]

  def test_measured_batches_do_not_overflow_and_others_are_exact(self):
    def loss(p, x):
      y = jax.nn.relu(x @ p["in"] - 1.0)
      return jnp.sum((y @ p["out"]) ** 2)

    _, p, x = make("mlp")
    rules = calibrate_zero_value(loss, [(p, x), (p, x[::-1])], params=(0, 1))
    ((_, codec),) = rules
    y = np.asarray(jax.nn.relu(x @ p["in"] - 1.0)).reshape(-1, 1024)
    fullest = float((y != 0).mean(axis=1).max())
    assert codec == codecs.zero_value(capacity=1.05 * fullest)
    for scale, expected_count in ((1.0, 0), (5.0, 1)):
      expected = jax.jit(jax.value_and_grad(loss))(p, scale * x)
      count, found = run_counting(loss, rules, p, scale * x)
      assert count == expected_count and same(expected, found)

  def test_the_capacity_of_a_loop_fits_its_fullest_iteration(self):
    _, p, x = make("mlp")
    loss, args = looped(relu_block), (stacked(p, 3), x)
    rules = calibrate_zero_value(loss, [args])
    (name,) = [pattern for pattern, _ in rules]
    assert name == "^sparse/scan_0/custom_jvp_call_0$"
    narrow = codecs.zero_value(capacity=0.01)
    for codec, expected_count in ((rules, 0), (narrow, 3)):
      count, found = run_counting(loss, codec, *args, params=0)
      assert count == expected_count
      assert distance(plain_relu_gradients(), found) < ORDER


class TestErrors:
  def test_second_derivatives(self):
    w, x = normal(0, 8, 8), normal(1, 300, 8)
    for codec in (None, INT8):
      fn = compress_residuals(lambda w, x: jnp.sum(jnp.tanh(x @ w)), codec)
      with pytest.raises(NotImplementedError, match="no second derivatives"):
        jax.grad(lambda w, fn=fn: jnp.sum(jax.grad(fn)(w, x) ** 2))(w)

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

  @pytest.mark.parametrize(
    ("codec", "error", "match"),
    [
      ([("hiden", INT8)], ValueError, "got 'hiden', which matches none of"),
      (
        lambda r: INT8 if r.kind == "mask" else codecs.cast("bfloat16"),
        TypeError,
        "must be None for mask/",
      ),
      (codecs.feedback(INT8), ValueError, "must be a codec without state for"),
    ],
    ids=["rule", "mask", "state"],
  )
  def test_codecs_of_no_residual(self, codec, error, match):
    def loss(w, x):
      return jnp.sum(jax.nn.relu(x @ w) @ w)

    args = normal(0, 64, 64), normal(1, 64, 64)
    with pytest.raises(error, match=match):
      residuals_of(loss, *args, codec=codec)
    with pytest.raises(error, match=match):
      compress_residuals(loss, codec)(*args)

  def test_positions_beyond_the_arguments(self):
    block, p, x = make("mlp")
    with pytest.raises(ValueError, match="`params` must be positions of the 2"):
      compress_residuals(block, params=2)(p, x)
