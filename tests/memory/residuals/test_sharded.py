"""Residuals of arrays that the compiler partitions, without `shard_map`."""

import functools
import re

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

from jaxmotion import codecs
from jaxmotion.memory import compress_residuals, offload
from jaxmotion.program import parse_hlo
from tests.memory.residuals.nets import distance, normal

MESH = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))


def relu_loss(w, x):
  return jnp.sum(jax.nn.relu(x @ w) @ w)


def mask_loss(w, x):
  return jnp.sum(jnp.where(x @ w > 0.1, jnp.sin(x), x) @ w)


def pool_loss(w, x):
  x = jnp.sin(x @ w).reshape(-1, 8, 8, w.shape[0] // 2)
  window = (1, 2, 2, 1)
  y = jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, window, window, "VALID")
  return jnp.sum(y**2)


@functools.cache
def run_sharded(loss, spec, codec="plain"):
  """Returns the gradients, and the bytes that collectives return."""
  w, x = normal(0, 64, 64), normal(1, 128, 64)
  x = jax.device_put(x, jax.NamedSharding(MESH, spec))
  fn = loss if codec == "plain" else compress_residuals(loss, codec)
  compiled = jax.jit(jax.grad(fn, argnums=(0, 1))).lower(w, x).compile()
  module = parse_hlo(compiled.as_text())
  moved_bytes = sum(
    i.memory_bytes
    for instructions in module.computations.values()
    for i in instructions.values()
    if re.match("all-|reduce-scatter|collective", i.opcode)
  )
  return compiled(w, x), moved_bytes


@pytest.mark.parametrize("spec", [P("data"), P(None, "data")], ids=str)
@pytest.mark.parametrize("loss", [relu_loss, mask_loss, pool_loss])
@pytest.mark.parametrize("codec", [None, offload()], ids=["saved", "offloaded"])
def test_masks_are_packed_where_they_are(loss, spec, codec):
  expected, plain_bytes = run_sharded(loss, spec)
  found, moved_bytes = run_sharded(loss, spec, codec)
  assert distance(expected, found) < 1e-6
  assert moved_bytes == plain_bytes


@pytest.mark.parametrize(
  ("codec", "most"),
  [
    (codecs.cast("bfloat16"), 0.01),
    (codecs.zero_value(capacity=0.7), 1e-6),
    (codecs.uniform(bits=8, rounding="stochastic"), 0.02),
  ],
  ids=["cast", "zero_value", "random"],
)
def test_codecs_encode_partitioned_arrays(codec, most):
  expected, plain_bytes = run_sharded(relu_loss, P("data"))
  found, moved_bytes = run_sharded(relu_loss, P("data"), codec)
  assert distance(expected, found) < most
  if codec == codecs.cast("bfloat16"):
    assert moved_bytes == plain_bytes
