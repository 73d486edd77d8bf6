import functools

import jax
import jax.numpy as jnp
import pytest
from flax import linen, nnx
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec as P

from jaxmotion import codecs
from jaxmotion.memory import compress_residuals, offload, recompute
from jaxmotion.memory.residuals import residuals_of
from tests.memory.residuals.nets import (
  NAMES,
  distance,
  looped,
  make,
  normal,
  same,
  squared,
  stacked,
)

INT8 = codecs.uniform(bits=8, block=128)
INT4 = codecs.uniform(bits=4, block=64, rounding="stochastic")


def gradients(fn, *args):
  return jax.jit(jax.value_and_grad(fn, argnums=(0, 1)))(*args)


@functools.cache
def plain(name):
  block, p, x = make(name)
  return gradients(looped(block), stacked(p, 3), x)


@pytest.mark.parametrize("name", NAMES)
def test_lossless_gradients_are_the_plain_ones(name):
  block, p, x = make(name)
  if name == "pool":  # It halves the image, so it is no loop's body.
    expected = gradients(squared(block), p, x)
    found = gradients(compress_residuals(squared(block)), p, x)
  else:
    expected = plain(name)
    loss = looped(compress_residuals(block))
    found = gradients(loss, stacked(p, 3), x)
  # XLA may fuse, and so add up, in another order.
  assert distance(expected, found) < 1e-6


@pytest.mark.parametrize("name", ["mlp", "attention", "conv"])
@pytest.mark.parametrize(("codec", "most"), [(INT8, 0.02), (INT4, 0.4)])
def test_lossy_gradients_are_near_and_values_exact(name, codec, most):
  block, p, x = make(name)
  loss = looped(compress_residuals(block, codec))
  value, grads = gradients(loss, stacked(p, 3), x)
  expected, exact = plain(name)
  assert abs(value - expected) < 1e-6 * abs(expected)
  assert 0 < distance(exact, grads) < most


@pytest.mark.parametrize("name", ["mlp", "attention", "conv"])
def test_the_compiled_loop_holds_less(name):
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


def test_what_is_kept_weighs_what_is_said():
  block, p, x = make("attention")
  found = residuals_of(block, p, x, codec=INT8)
  halves = jax.eval_shape(
    lambda p, x: jax.vjp(compress_residuals(block, INT8), p, x)[1], p, x
  )
  held = sum(a.size * a.dtype.itemsize for a in jax.tree.leaves(halves))
  weights = sum(a.nbytes for a in jax.tree.leaves(p))
  assert sum(r.encoded_bytes for r in found) == held - weights


def test_a_loop_inside_is_compressed_too():
  block, p, x = make("mlp")
  p = stacked(p, 3)
  assert same(plain("mlp"), gradients(compress_residuals(looped(block)), p, x))
  inside = residuals_of(looped(block), p, x)
  assert {r.repeats for r in inside if "scan_0/" in r.name} == {3}
  names = [r.name for r in inside]
  assert "dense/scan_0/dot_general_0" in names


def test_masks_are_not_made_of_values_that_were_rounded():
  _, p, x = make("mlp")

  def loss(p, x):
    return jnp.sum(jax.nn.relu(x @ p["in"]) @ p["out"])

  exact = jax.grad(loss)(p, x)
  fn = compress_residuals(loss, INT8, params=(0, 1))
  found = jax.jit(jax.grad(fn))(p, x)
  # The mask and arguments are all that the gradient of p["in"] depends on.
  assert same(exact["in"], found["in"])
  kinds = {r.kind for r in residuals_of(loss, p, x, codec=INT8)}
  assert "mask" in kinds


def test_masks_are_computed_again_with_the_product_they_are_made_of():
  def block(w, x):
    return jnp.tanh(jax.nn.relu(x @ w[0]) @ w[1])

  def first(w, x):
    return jax.nn.relu(x) @ w[0]

  w, x = normal(0, 2, 64, 64), normal(1, 128, 64)
  for fn, kinds in ((block, ["dense"]), (first, ["mask", "sparse"])):
    kept = residuals_of(fn, w, x, codec=INT8, recompute="all")
    assert sorted(r.kind for r in kept) == kinds
  loss = compress_residuals(first, INT8, recompute="all")
  exact, found = (
    jax.grad(lambda x, fn=fn: jnp.sum(fn(w, x)))(x) for fn in (first, loss)
  )
  assert same(exact, found)


def test_a_mask_is_made_of_what_a_rectifier_returns():
  _, p, x = make("mlp")

  def loss(p, x):
    return jnp.sum(jax.nn.relu(x @ p["in"]) @ p["out"])

  assert [r.kind for r in residuals_of(loss, p, x, params=(0, 1))] == ["sparse"]


def test_parameters_are_not_kept_twice():
  def fn(w, x):
    return jnp.sum(jnp.tanh(x @ w.astype(jnp.bfloat16).astype(jnp.float32)))

  w, x = normal(0, 64, 64), normal(1, 128, 64)
  assert not any(r.shape == (64, 64) for r in residuals_of(fn, w, x))
  kept = residuals_of(fn, w, x, params=(1,))
  assert not any(r.shape == (128, 64) and "/1" in r.name for r in kept)


def test_everything_is_computed_again_if_asked_for():
  block, p, x = make("mlp")
  kept = residuals_of(block, p, x, recompute="all")
  assert [(r.shape, r.kind) for r in kept] == [(x.shape, "dense")]
  loss = looped(compress_residuals(block, recompute="all"))
  (_, a), (_, b) = plain("mlp"), gradients(loss, stacked(p, 3), x)
  assert distance(a, b) < 1e-6


def test_rules_say_what_becomes_of_each():
  block, p, x = make("mlp")
  names = [r.name for r in residuals_of(block, p, x)]
  assert "dense/dot_general_0" in names
  rules = [
    ("dot_general_0", recompute()),
    ("tanh|square|dot_general_1", codecs.cast("bfloat16")),
    ("dense", offload(INT8)),
  ]
  kept = {r.name: r for r in residuals_of(block, p, x, codec=rules)}
  assert "dense/dot_general_0" not in kept
  (narrow,) = [r for r in kept.values() if r.codec == codecs.cast("bfloat16")]
  del kept[narrow.name]
  assert narrow.shape == x.shape and not narrow.on_host
  assert kept and all(r.on_host and r.codec == INT8 for r in kept.values())
  value, grads = gradients(squared(compress_residuals(block, rules)), p, x)
  expected, exact = gradients(squared(block), p, x)
  assert value == expected and distance(exact, grads) < 0.02


def test_offloaded_residuals_come_back():
  block, p, x = make("attention")
  loss = looped(compress_residuals(block, offload()))
  found = gradients(loss, stacked(p, 3), x)
  assert distance(plain("attention"), found) < 1e-6


def test_labels_name_residuals():
  def fn(w, x):
    h = checkpoint_name(x @ w, "hidden")
    return jnp.sum(jnp.sin(h))

  w, x = normal(0, 64, 64), normal(1, 64, 64)
  kept = residuals_of(fn, w, x, codec=[("hidden", INT8)], params=(0, 1))
  assert [(r.name, r.codec) for r in kept] == [("dense/hidden", INT8)]


def test_random_rounding_can_be_repeated_and_differs_between_arrays():
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

  @pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
  def test_narrow_floats(self, dtype):
    block, p, x = make("mlp")
    p, x = jax.tree.map(lambda a: a.astype(dtype), (p, x))
    self.check(squared(block), p, x)

  def test_parameters_closed_over(self):
    _, p, x = make("mlp")

    def loss(wrap, p):
      return jnp.sum(wrap(lambda x: jnp.tanh(x @ p["in"]) @ p["out"])(x) ** 2)

    expected = jax.grad(functools.partial(loss, lambda f: f))(p)
    wrap = functools.partial(compress_residuals, params=())
    assert same(expected, jax.grad(functools.partial(loss, wrap))(p))

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
    variables = net.init(jax.random.key(0), x, False)

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
    assert same(expected, jax.jit(grad(compress_residuals(loss)))(*args))

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
  def loss(self, p, x):
    y = jax.nn.relu(x @ p["in"] - 0.5)
    return jnp.sum((jax.nn.relu(y @ p["out"]) - 1.0) ** 2)

  def run(self, capacity):
    _, p, x = make("mlp")
    fn = compress_residuals(
      self.loss,
      codecs.zero_value(capacity=capacity),
      params=(0, 1),
      count_overflows=True,
    )
    grad = jax.jit(jax.value_and_grad(fn, has_aux=True))
    (value, overflows), grads = grad(p, x)
    return value, grads, int(overflows)

  def test_it_is_exact_where_everything_has_room(self):
    _, p, x = make("mlp")
    expected = jax.jit(jax.value_and_grad(self.loss))(p, x)
    value, grads, overflows = self.run(0.7)
    assert overflows == 0 and same(expected, (value, grads))

  def test_it_is_exact_where_nothing_has_and_says_how_often(self):
    _, p, x = make("mlp")
    expected = jax.jit(jax.value_and_grad(self.loss))(p, x)
    value, grads, overflows = self.run(0.01)
    assert overflows == 2 and same(expected, (value, grads))

  def test_it_is_exact_beside_residuals_that_are_rounded(self):
    _, p, x = make("mlp")
    p["last"] = normal(3, 16, 4)

    def loss(p, x):
      y = jax.nn.relu(jnp.sin(x @ p["in"]) @ p["out"] - 0.5)
      return jnp.sum(y @ p["last"])

    full = codecs.zero_value(capacity=0.01)
    rules = [("sparse", full), ("dense", INT8)]
    fn = compress_residuals(loss, rules, params=(0, 1), count_overflows=True)
    grads, overflows = jax.jit(jax.grad(fn, has_aux=True))(p, x)
    assert int(overflows) == 1
    # That of p["last"] depends on nothing but what had no room.
    assert same(jax.jit(jax.grad(loss))(p, x)["last"], grads["last"])

  def test_inputs_of_a_loop_are_kept_as_the_way_out(self):
    def block(p, x):
      return jax.nn.relu(x @ p["in"] - 0.2) @ p["out"]

    _, p, x = make("mlp")
    p = stacked(p, 3)
    expected = jax.jit(jax.value_and_grad(looped(block)))(p, x)
    for capacity, often in ((0.01, 3), (0.9, 0)):
      fn = compress_residuals(
        looped(block),
        codecs.zero_value(capacity=capacity),
        count_overflows=True,
      )
      grad = jax.jit(jax.value_and_grad(fn, has_aux=True))
      (value, overflows), grads = grad(p, x)
      assert int(overflows) == often
      assert same(expected, (value, grads))


class TestErrors:
  def test_forward_mode(self):
    block, p, x = make("mlp")
    fn = compress_residuals(block)
    with pytest.raises(TypeError, match="forward-mode"):
      jax.jvp(fn, (p, x), (p, x))

  def test_second_derivatives(self):
    fn = compress_residuals(lambda w, x: jnp.sum(jnp.tanh(x @ w)))
    w, x = normal(0, 8, 8), normal(1, 300, 8)
    with pytest.raises(NotImplementedError, match="no second derivatives"):
      jax.grad(lambda w: jnp.sum(jax.grad(fn)(w, x) ** 2))(w)

  def test_side_effects(self):
    def talks(p, x):
      jax.debug.print("{}", x[0, 0])
      return jnp.sum(x @ p)

    with pytest.raises(ValueError, match="`fn` must have no side effects"):
      compress_residuals(talks)(jnp.eye(2), jnp.eye(2))

  def test_a_rule_that_matches_nothing(self):
    block, p, x = make("mlp")
    fn = compress_residuals(block, [("hiden", INT8)])
    with pytest.raises(ValueError, match="got 'hiden', which matches none of"):
      fn(p, x)

  def test_a_pattern_that_is_none(self):
    with pytest.raises(ValueError, match="`codec` must have regular"):
      compress_residuals(len, [("(", INT8)])

  def test_something_that_is_no_codec(self):
    with pytest.raises(TypeError, match="`codec` must be a Codec"):
      compress_residuals(len, 8)

  def test_a_codec_that_does_not_take_the_dtype(self):
    def loss(w, x):
      return jnp.sum(jax.nn.relu(x @ w) @ w)

    fn = compress_residuals(
      loss, lambda r: INT8 if r.kind == "mask" else codecs.cast("bfloat16")
    )
    with pytest.raises(TypeError, match="must be None for mask/"):
      fn(normal(0, 64, 64), normal(1, 64, 64))

  def test_a_codec_with_memory(self):
    block, p, x = make("mlp")
    fn = compress_residuals(block, codecs.feedback(INT8))
    with pytest.raises(ValueError, match="must be a codec without state for"):
      fn(p, x)

  def test_positions_that_are_no_arguments(self):
    block, p, x = make("mlp")
    with pytest.raises(ValueError, match="`params` must be positions of the 2"):
      compress_residuals(block, params=2)(p, x)

  def test_a_way_to_recompute_that_is_none(self):
    with pytest.raises(ValueError, match="`recompute` must be one of"):
      compress_residuals(len, recompute="some")


def test_names_do_not_depend_on_the_run():
  block, p, x = make("conv")
  names = [[r.name for r in residuals_of(block, p, x)] for _ in range(2)]
  assert names[0] == names[1] and len(set(names[0])) == len(names[0])
