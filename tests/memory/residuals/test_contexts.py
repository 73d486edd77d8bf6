"""Names, precisions and effects of a function, in its two passes."""

import re

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.experimental import checkify

from jaxmotion import codecs
from jaxmotion.memory import compress_residuals
from tests.memory.residuals.nets import normal

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


@pytest.mark.parametrize("codec", [None, INT8], ids=["exact", "int8"])
def test_scopes_name_the_operations_of_both_passes(codec):
  def operation_names(fn):
    program = jax.jit(jax.grad(fn, argnums=(0, 1))).lower(
      normal(0, 64, 64), normal(1, 64, 64)
    )
    text = program.as_text(debug_info=True)
    return set(re.findall(r'"([^"]*dot_general)"', text))

  expected = operation_names(scoped_loss)
  assert any("transpose(jvp(attention))" in name for name in expected)
  assert operation_names(compress_residuals(scoped_loss, codec)) == expected


def test_precisions_are_those_of_the_plain_passes():
  def dots(fn):
    text = jax.jit(jax.grad(fn)).lower(normal(0, 64, 64), normal(1, 64, 64))
    found = re.findall(r"dims = (.*), precision = (.*) :", text.as_text())
    return set(found)

  expected = dots(scoped_loss)
  assert len(expected) > 3
  assert dots(compress_residuals(scoped_loss)) == expected


def printed_loss(w, x):
  def layer(x, w):
    jax.debug.callback(SEEN.append, x[0, 0], ordered=True)
    return jnp.sin(x @ w), None

  jax.debug.callback(SEEN.append, jnp.max(x), ordered=True)
  x, _ = lax.scan(layer, x, jnp.stack([w, w]))
  return jnp.sum(print_cotangent(x) ** 2)


@jax.custom_vjp
def print_cotangent(x):
  return x


def _print_backward(_, ct):
  jax.debug.callback(SEEN.append, ct[0, 0], ordered=True)
  return (ct,)


print_cotangent.defvjp(lambda x: (x, None), _print_backward)
SEEN = []


def test_debug_callbacks_run_once_whatever_is_recomputed():
  def seen(fn):
    SEEN.clear()
    jax.jit(jax.value_and_grad(fn))(normal(0, 64, 64), normal(1, 64, 64))
    jax.effects_barrier()
    return [float(x) for x in SEEN]

  before, *in_loop, after = seen(printed_loss)
  for budget in (None, 0):
    once = seen(compress_residuals(printed_loss, memory_budget=budget))
    assert once == pytest.approx([before, *in_loop, after])


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
