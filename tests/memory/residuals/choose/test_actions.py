"""Rules by the names that `checkpoint_name` gives, as stock policies have."""

import functools

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from jaxmotion.memory import (
  compress_residuals,
  residuals_of,
  save_and_offload_only_these_names,
  save_only_these_names,
)
from tests.memory.residuals.nets import distance, gradients, normal


def looped_loss(ws, x):
  def layer(x, w):
    x = checkpoint_name(jnp.tanh(x @ w), "hidden")
    return jnp.sin(checkpoint_name(jnp.tanh(x @ w), "inner") @ w), None

  return jnp.sum(lax.scan(layer, x, ws)[0] ** 2)


ARGUMENTS = normal(0, 2, 64, 64), normal(1, 64, 64)


@functools.cache
def plain_gradients():
  return gradients(looped_loss, *ARGUMENTS)


@pytest.mark.parametrize(
  ("rules", "hidden_on_host"),
  [
    (save_only_these_names("hidden"), False),
    (
      save_and_offload_only_these_names(
        names_which_can_be_saved=["inner"],
        names_which_can_be_offloaded=["hidden"],
      ),
      True,
    ),
  ],
)
def test_named_residuals_are_saved_and_others_recomputed(rules, hidden_on_host):
  found = residuals_of(looped_loss, *ARGUMENTS, codec=rules)
  on_host = {r.name: r.on_host for r in found}
  assert on_host["dense/scan_0/hidden"] == hidden_on_host
  assert not any("dot_general" in name for name in on_host)
  compressed = compress_residuals(looped_loss, rules)
  assert distance(plain_gradients(), gradients(compressed, *ARGUMENTS)) < 1e-6


def test_a_name_that_no_residual_has_is_refused():
  with pytest.raises(ValueError, match="`codec` must match a residual each"):
    jax.eval_shape(
      compress_residuals(looped_loss, save_only_these_names("hiden")),
      *ARGUMENTS,
    )
