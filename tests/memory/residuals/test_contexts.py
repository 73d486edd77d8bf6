"""Names, precisions and effects of a function, in its two passes."""

import re

import jax
import jax.numpy as jnp
import pytest
from jax import lax

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
