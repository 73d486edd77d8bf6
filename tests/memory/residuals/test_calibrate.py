import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmotion import codecs
from jaxmotion.memory import calibrate_zero_value, compress_residuals
from tests.memory.residuals.nets import (
  looped,
  make,
  relu_block,
  same,
  stacked,
)


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
  _, p, x = make("mlp")
  with pytest.raises(
    ValueError, match="`headroom` must be a number in .*, got -1"
  ):
    calibrate_zero_value(loss, [(p, x)], headroom=-1)
  with pytest.raises(ValueError, match="`batches` must hold"):
    calibrate_zero_value(loss, [])
