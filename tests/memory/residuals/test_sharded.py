"""Residuals of arrays that a compiler partitions over devices."""

import collections
import functools
import re

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

from jaxmotion import codecs
from jaxmotion.memory import compress_residuals, offload
from jaxmotion.program import parse_hlo
from tests.memory.residuals.nets import distance, norm, normal


def run_compiled(fn, *args):
  """Returns the result, and the bytes that each kind of collective returns."""
  compiled = jax.jit(fn).lower(*args).compile()
  moved_bytes: collections.Counter[str] = collections.Counter()
  for instructions in parse_hlo(compiled.as_text()).computations.values():
    for i in instructions.values():
      if re.match("all-|reduce-scatter|collective", i.opcode):
        moved_bytes[i.opcode] += i.memory_bytes
  return compiled(*args), moved_bytes


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
  mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,))
  x = jax.device_put(normal(1, 128, 64), NamedSharding(mesh, spec))
  fn = loss if codec == "plain" else compress_residuals(loss, codec)
  grad = jax.grad(fn, argnums=(0, 1))
  found, moved_bytes = run_compiled(grad, normal(0, 64, 64), x)
  return found, moved_bytes.total()


@pytest.mark.parametrize("loss", [relu_loss, mask_loss, pool_loss])
def test_masks_are_packed_where_they_are(loss):
  for spec, codec in ((P("data"), offload()), (P(None, "data"), None)):
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


BATCH, TOKENS, WIDTH, HEADS = 8, 16, 32, 4
INT8 = offload(codecs.uniform(bits=8))
SHAPES = {
  "q": (WIDTH, HEADS, WIDTH // HEADS),
  "out": (HEADS, WIDTH // HEADS, WIDTH),
  "up": (WIDTH, 2 * WIDTH),
  "down": (2 * WIDTH, WIDTH),
}
# Weights of each layout, then the tokens.
LAYOUTS = {
  "tensor_parallel": {
    **dict.fromkeys(("q", "up"), P(None, "x")),
    **dict.fromkeys(("out", "down"), P("x")),
    "tokens": P(),
  },
  "fully_sharded": {**dict.fromkeys(SHAPES, P("x")), "tokens": P("x")},
}


def run_blocks(unroll, tokens, params, x):
  """Returns a loss of blocks, written out or in a loop."""
  # tokens: sharding of the tokens; None where axes are of kind `Auto`.

  def block(x, p):
    q = jnp.einsum("btd,dhe->bthe", norm(x, -1), p["q"])
    weights = jax.nn.softmax(jnp.einsum("bthe,bshe->bhts", q, q))
    y = jnp.einsum("bhts,bshe->bthe", weights, q)
    x = x + jnp.einsum("bthe,hed->btd", y, p["out"], out_sharding=tokens)
    h = jax.nn.relu(jnp.einsum("btd,df->btf", norm(x, -1), p["up"]))
    x = x + jnp.einsum("btf,fd->btd", h, p["down"], out_sharding=tokens)
    return x, None

  if unroll:
    for i in range(2):
      x, _ = block(x, jax.tree.map(lambda a, i=i: a[i], params))
  else:
    x, _ = lax.scan(block, x, params)
  return jnp.sum(x**2)


def run_transformer(layout, kind, wrap, unroll=False):
  """Returns the gradients, and the bytes of each kind of collective."""
  mesh = jax.make_mesh((4,), ("x",), axis_types=(kind,))
  specs = LAYOUTS[layout]
  params = {
    name: jax.device_put(
      normal(i, 2, *shape), NamedSharding(mesh, P(None, *specs[name]))
    )
    for i, (name, shape) in enumerate(SHAPES.items())
  }
  tokens = NamedSharding(mesh, specs["tokens"])
  x = jax.device_put(normal(9, BATCH, TOKENS, WIDTH), tokens)
  is_explicit = kind == AxisType.Explicit
  fn = functools.partial(run_blocks, unroll, tokens if is_explicit else None)
  return run_compiled(jax.grad(wrap(fn)), params, x)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_residuals_of_transformers_stay_on_their_devices(kind):
  run = functools.partial(run_transformer, "tensor_parallel", kind)
  expected, plain = run(lambda fn: fn)
  found, moved_bytes = run(lambda fn: compress_residuals(fn, INT8))
  assert 0 < distance(expected, found) < 0.03
  assert moved_bytes == plain
  assert plain


def test_codecs_move_nothing_where_weights_lie_along_the_batch():
  """The weights are gathered again, as a stock policy does, and no more is."""
  policy = jax.checkpoint_policies.dots_saveable
  layout = "fully_sharded", AxisType.Auto
  run = functools.partial(run_transformer, *layout, unroll=True)
  _, stock = run(functools.partial(jax.checkpoint, policy=policy))
  int8 = codecs.uniform(bits=8)
  exact, expected = run(compress_residuals)
  found, moved_bytes = run(lambda fn: compress_residuals(fn, int8))
  assert 0 < distance(exact, found) < 0.03
  assert moved_bytes == expected == stock
  assert expected["all-gather"]


def test_a_loop_with_weights_along_the_batch_moves_what_plain_training_does():
  """Codecs are left out: a compiler may move what they decode in a loop."""
  run = functools.partial(run_transformer, "fully_sharded", AxisType.Auto)
  expected, plain = run(lambda fn: fn)
  found, moved_bytes = run(compress_residuals)
  assert distance(expected, found) < 1e-5
  assert moved_bytes == plain
  assert plain["all-gather"]
