"""Arguments, modes of differentiation, names, precisions and effects."""

import dataclasses
import functools
import re
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import checkify

from jaxmotion import codecs
from jaxmotion.memory import compress_residuals, residuals_of
from tests.memory.residuals.nets import make, normal, squared


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Layer:
  """A module whose leaves are weights, a function, a name and a flag."""

  w: jax.Array
  activation: Callable
  name: str
  use_bias: object


def run_layer(layer, x, train, mode="sum"):
  y = layer.activation(x @ layer.w)
  y = 2 * y if train else y
  return jnp.sum(jnp.sin(y)), {"name": layer.name, "mode": mode, "y": y[0, 0]}


def test_modules_flags_and_results_of_other_types_pass():
  half = codecs.cast("bfloat16")
  fn = compress_residuals(run_layer, half, static_argnums=(2, -1))
  layer, x = (
    Layer(normal(0, 64, 64), jnp.tanh, "top", object()),
    normal(1, 64, 64),
  )

  def loss(run, w, train):
    value, aux = run(dataclasses.replace(layer, w=w), x, train, "mean")
    assert (aux["name"], aux["mode"]) == ("top", "mean")
    return value + aux["y"]

  for train in (True, False):
    expected, found = (
      jax.jit(jax.grad(functools.partial(loss, run, train=train)))(layer.w)
      for run in (run_layer, fn)
    )
    np.testing.assert_allclose(found, expected, atol=0.1)
  found = residuals_of(functools.partial(run_layer, train=True), layer, x)
  assert "dense/1" in {r.name for r in found}
  with pytest.raises(jax.errors.TracerBoolConversionError):
    compress_residuals(run_layer)(layer, x, True)


def test_gradients_that_nothing_asks_for_are_not_computed():
  block, p, x = make("mlp")
  loss = squared(block)

  def count_products(fn, argnums):
    return str(jax.make_jaxpr(jax.grad(fn, argnums))(p, x)).count("dot_general")

  ours = compress_residuals(loss)
  for argnums in (0, (0, 1)):
    assert count_products(ours, argnums) == count_products(loss, argnums)
  assert count_products(loss, 0) < count_products(loss, (0, 1))


def test_a_loop_keeps_the_gradient_of_its_carry():
  """XLA takes more memory for a loop of which nothing reads a result."""

  def loss(p, x):
    def layer(x, w):
      return jnp.tanh(x @ w), None

    return jnp.sum(jax.lax.scan(layer, x, p)[0] ** 2)

  p, x = jnp.ones((3, 8, 8)), jnp.ones((4, 8))

  def count_tied(argnums):
    gradient = jax.grad(compress_residuals(loss), argnums)
    steps = jax.make_jaxpr(gradient)(p, x).eqns
    barriers = [s for s in steps if s.primitive.name == "optimization_barrier"]
    return len(barriers[-1].invars)

  assert count_tied(0) == count_tied((0, 1))


def test_no_tracer_outlives_the_trace():
  block, p, x = make("mlp")
  with jax.checking_leaks():
    jax.make_jaxpr(jax.grad(compress_residuals(squared(block))))(p, x)


W, X = jnp.eye(4), jnp.linspace(-1, 1, 8).reshape(2, 4)


def layer(w, x):
  return jnp.tanh(x @ w)


LAYER = compress_residuals(layer)


def repeat(fn, w, x):
  return lax.scan(lambda x, _: (fn(w, x), None), x, None, length=3)[0].sum()


FORWARD = {
  "jvp": lambda w: jax.jvp(lambda w: LAYER(w, X), (w,), (w,)),
  "jvp of jit": lambda w: jax.jvp(lambda w: jax.jit(LAYER)(w, X), (w,), (w,)),
  "jacfwd": lambda w: jax.jacfwd(LAYER)(w, X),
  "linearize": lambda w: jax.linearize(lambda w: LAYER(w, X), w)[1](w),
  "loop": lambda w: jax.jvp(lambda w: repeat(LAYER, w, X), (w,), (w,)),
}


@pytest.mark.parametrize("name", FORWARD)
def test_forward_mode_is_refused_but_tangents_of_others_pass(name):
  for call in (FORWARD[name], jax.jit(FORWARD[name])):
    with pytest.raises(TypeError, match="`compress_residuals` has no forward"):
      call(W)
  primal, tangent = jax.jvp(lambda scale: scale * LAYER(W, X), (3.0,), (2.0,))
  assert jnp.array_equal(2 * primal, 3 * tangent)


REVERSE = {
  "checkpoint": lambda fn: jax.grad(jax.checkpoint(lambda w: repeat(fn, w, X))),
  "grad of vmap": lambda fn: jax.grad(
    lambda w: jax.vmap(lambda x: fn(w, x))(X).sum()
  ),
  "vmap of grad": lambda fn: jax.vmap(
    jax.grad(lambda w: fn(w, X).sum()), axis_size=1, in_axes=None
  ),
  "jacrev": lambda fn: jax.jacrev(lambda w: fn(w, X)),
}


@pytest.mark.parametrize("name", REVERSE)
def test_reverse_mode_is_that_of_the_function(name):
  make = REVERSE[name]
  wanted = make(layer)(W)
  for found in (make(LAYER)(W), jax.jit(make(LAYER))(W)):
    assert jnp.allclose(found, wanted, rtol=1e-6, atol=1e-6)


INT8 = codecs.uniform(bits=8)


def scoped_loss(w, x):
  with jax.named_scope("attention"):
    x = jnp.tanh(x @ w)
  with jax.named_scope("mlp"):
    with jax.default_matmul_precision("highest"):
      x = jax.nn.gelu(x @ w)
    x, _ = lax.scan(looped_layer, x, w.reshape(1, 64, 64))
  return jnp.sum(x)


def looped_layer(x, w):
  with jax.named_scope("layer"):
    return jnp.sin(x @ w), None


def test_scopes_and_precisions_are_those_of_the_plain_passes():
  def list_products(fn):
    like = jax.ShapeDtypeStruct((64, 64), jnp.float32)
    program = jax.jit(jax.grad(fn, argnums=(0, 1))).lower(like, like)
    text = program.as_text(debug_info=True)
    names = set(re.findall(r'"([^"]*dot_general)"', text))
    return names, set(re.findall(r"dims = (.*), precision = (.*) :", text))

  expected = list_products(scoped_loss)
  assert any("transpose(jvp(attention))" in name for name in expected[0])
  assert len(expected[1]) > 3
  for codec in (None, INT8):
    assert list_products(compress_residuals(scoped_loss, codec)) == expected


def printed_loss(w, x):
  def layer(x, w):
    jax.debug.callback(SEEN.append, x[0, 0], ordered=True)
    return jnp.sin(x @ w), None

  jax.debug.callback(SEEN.append, jnp.max(x), ordered=True)
  x, _ = lax.scan(layer, x, jnp.stack([w, w]))
  return jnp.sum(print_cotangent(x) ** 2)


def _print_backward(_, ct):
  jax.debug.callback(SEEN.append, ct[0, 0], ordered=True)
  return (ct,)


print_cotangent = jax.custom_vjp(lambda x: x)
print_cotangent.defvjp(lambda x: (x, None), _print_backward)
SEEN = []


def test_debug_callbacks_run_once_whatever_is_recomputed():
  def seen(fn):
    SEEN.clear()
    jax.jit(jax.value_and_grad(fn))(normal(0, 64, 64), normal(1, 64, 64))
    jax.effects_barrier()
    return [float(x) for x in SEEN]

  expected = seen(printed_loss)
  assert len(expected) == 1 + 2 + 1
  for budget in (None, 0):
    once = seen(compress_residuals(printed_loss, memory_budget=budget))
    assert once == pytest.approx(expected)


def checked_loss(w, x):
  def layer(x, w):
    checkify.check(jnp.all(x < 5), "in loop")
    return jnp.sin(x @ w), None

  x, _ = lax.scan(layer, x, w.reshape(1, 64, 64))
  checkify.check(jnp.all(x < 0.9), "behind loop")
  return jnp.sum(x)


def test_checkify_finds_failures_inside_and_around():
  compressed = compress_residuals(checked_loss, INT8)
  around = jax.jit(checkify.checkify(compressed))
  inside = jax.jit(compress_residuals(checkify.checkify(checked_loss), INT8))
  w, x = jnp.eye(64), jnp.zeros((64, 64))
  for value, message in [(0.0, None), (2.0, "behind loop"), (6.0, "in loop")]:
    for found in (around(w, x + value), inside(w, x + value)):
      text = found[0].get()
      assert text is None if message is None else message in text
