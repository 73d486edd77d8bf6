"""Residuals of transformers that a compiler partitions over four devices."""

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

BATCH, TOKENS, WIDTH, HEADS = 8, 16, 32, 4
INT8 = offload(codecs.uniform(bits=8))
SHAPES = {
  "q": (WIDTH, HEADS, WIDTH // HEADS),
  "out": (HEADS, WIDTH // HEADS, WIDTH),
  "up": (WIDTH, 2 * WIDTH),
  "down": (2 * WIDTH, WIDTH),
}
# Weights of each layout, then the tokens.
DATA_PARALLEL = {**dict.fromkeys(SHAPES, P()), "tokens": P("x")}
TENSOR_PARALLEL = {
  "q": P(None, "x"),
  "out": P("x"),
  "up": P(None, "x"),
  "down": P("x"),
  "tokens": P(),
}
FULLY_SHARDED = {**dict.fromkeys(SHAPES, P("x")), "tokens": P("x")}
LAYOUTS = {
  "data_parallel": DATA_PARALLEL,
  "tensor_parallel": TENSOR_PARALLEL,
  "fully_sharded": FULLY_SHARDED,
}


def run_blocks(unroll, tokens, params, x):
  """Returns a loss of blocks.

  Args:
    unroll: whether they are written out; else they are a loop.
    tokens: sharding of the tokens; None where axes are of kind `Auto`.
    params: stacked weights.
    x: tokens.
  """

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


def run_sharded(layout, kind, wrap, unroll=False):
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
  compiled = jax.jit(jax.grad(wrap(fn))).lower(params, x).compile()
  moved_bytes: collections.Counter[str] = collections.Counter()
  for instructions in parse_hlo(compiled.as_text()).computations.values():
    for i in instructions.values():
      if re.match("all-|reduce-scatter|collective", i.opcode):
        moved_bytes[i.opcode] += i.memory_bytes
  return compiled(params, x), moved_bytes


@pytest.mark.parametrize(
  ("layout", "kind"),
  [
    ("tensor_parallel", AxisType.Auto),
    ("tensor_parallel", AxisType.Explicit),
    ("data_parallel", AxisType.Explicit),
  ],
)
def test_residuals_of_transformers_stay_on_their_devices(layout, kind):
  expected, plain = run_sharded(layout, kind, lambda fn: fn)
  found, moved_bytes = run_sharded(
    layout, kind, lambda fn: compress_residuals(fn, INT8)
  )
  assert 0 < distance(expected, found) < 0.03
  assert moved_bytes == plain
  assert plain


def test_codecs_move_nothing_where_weights_lie_along_the_batch():
  """The weights are gathered again, as a stock policy does, and no more is."""
  kind = AxisType.Auto
  policy = jax.checkpoint_policies.dots_saveable
  _, stock = run_sharded(
    "fully_sharded",
    kind,
    functools.partial(jax.checkpoint, policy=policy),
    unroll=True,
  )
  exact, expected = run_sharded(
    "fully_sharded", kind, compress_residuals, unroll=True
  )
  found, moved_bytes = run_sharded(
    "fully_sharded",
    kind,
    lambda fn: compress_residuals(fn, codecs.uniform(bits=8)),
    unroll=True,
  )
  assert 0 < distance(exact, found) < 0.03
  assert moved_bytes == expected == stock
  assert expected["all-gather"]


def test_a_loop_with_weights_along_the_batch_moves_what_plain_training_does():
  """Codecs are left out: a compiler may move what they decode in a loop."""
  expected, plain = run_sharded("fully_sharded", AxisType.Auto, lambda fn: fn)
  found, moved_bytes = run_sharded(
    "fully_sharded", AxisType.Auto, compress_residuals
  )
  assert distance(expected, found) < 1e-5
  assert moved_bytes == plain
  assert plain["all-gather"]
