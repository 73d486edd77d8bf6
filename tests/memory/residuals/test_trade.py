"""Which values are saved and which recomputed, in a budget or without."""

import dataclasses
import functools
import itertools
import random

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from jaxmotion.codecs import uniform
from jaxmotion.memory import compress_residuals, residuals_of
from jaxmotion.memory.residuals._traced import TracedFunction
from jaxmotion.memory.residuals.choose import make_choice, make_options
from jaxmotion.memory.residuals.choose._residual import ResidualTable
from jaxmotion.memory.residuals.choose._trade import Trade
from jaxmotion.memory.residuals.trace import trace_joint
from jaxmotion.perfmodel import builtin_platform, gbyte_per_s, predict_cost
from jaxmotion.program import array_bytes
from tests.memory.residuals.nets import distance, gradients

H100 = builtin_platform("h100_node").device
SHARES = (1.0, 0.5, 0.3, 0.1)


def attend(w, x):
  """One layer of an attention with residual connections and an MLP."""
  heads = (x @ w["qkv"]).reshape(*x.shape[:2], -1, 64)
  q, k, v = jnp.split(heads, 3, axis=2)
  scores = jnp.einsum("bthd,bshd->bhts", q, k) / 8
  shares = jax.nn.softmax(scores.astype(jnp.float32)).astype(x.dtype)
  seen = jnp.einsum("bhts,bshd->bthd", shares, v)
  x = x + seen.reshape(x.shape) @ w["out"]
  return x + jax.nn.gelu(x @ w["up"]) @ w["down"]


def loss(w, x):
  x, _ = lax.scan(lambda x, w: (attend(w, x), None), x, w)
  return jnp.mean(x.astype(jnp.float32) ** 2)


def shapes(layers=4, batch=8, length=1024, width=1024, dtype="bfloat16"):
  def weight(*shape):
    return jax.ShapeDtypeStruct((layers, *shape), dtype)

  w = {
    "qkv": weight(width, 3 * width),
    "out": weight(width, width),
    "up": weight(width, 4 * width),
    "down": weight(4 * width, width),
  }
  return w, jax.ShapeDtypeStruct((batch, length, width), dtype)


@functools.cache
def saved(**options):
  return residuals_of(loss, *shapes(), **options)


def total_bytes(residuals):
  return sum(r.encoded_bytes * r.repeats for r in residuals)


@functools.cache
def flops(fn):
  return predict_cost(jax.value_and_grad(fn), *shapes()).flops


def checkpointed(layer):
  """Returns the loss of a scan of layers that `jax.checkpoint` runs again."""
  layer = jax.checkpoint(layer)

  def run(w, x):
    x, _ = lax.scan(lambda x, w: (layer(w, x), None), x, w)
    return jnp.mean(x.astype(jnp.float32) ** 2)

  return run


def test_scores_of_an_attention_are_nearly_free_and_products_of_weights_not():
  sizes = [r.shape for r in saved()]
  assert (8, 16, 1024, 1024) not in sizes
  assert (8, 1024, 4096) in sizes and (8, 1024, 16, 64) in sizes
  extra = flops(compress_residuals(loss)) - flops(loss)
  again = 4 * 2 * 8 * 16 * 1024**2 * 64
  assert again <= extra < 1.15 * again


def test_budgets_are_kept_and_used():
  whole = total_bytes(saved(memory_budget=1.0))
  found = [total_bytes(saved(memory_budget=share)) for share in SHARES]
  assert found == sorted(found, reverse=True)
  # The carry of the loop is not recomputed, whatever the budget.
  limits = [max(share * whole, found[-1]) for share in SHARES]
  assert all(n <= most for n, most in zip(found, limits, strict=True))
  assert found[-1] < 0.3 * whole < found[1]
  # A budget slightly below all bytes gives up little.
  part = saved(memory_budget=0.93)
  largest = max(r.encoded_bytes for r in saved(memory_budget=1.0))
  assert largest in [r.encoded_bytes for r in part]
  assert total_bytes(part) <= 0.93 * whole
  exact = saved(memory_budget=found[2] + 1)
  assert 0.9 * found[2] <= total_bytes(exact) <= found[2]
  least = total_bytes(saved(memory_budget=0))
  assert total_bytes(saved(memory_budget=least)) == least
  with pytest.raises(ValueError, match=f"at least the .* {least}, got 4096"):
    saved(memory_budget=4096)


def test_what_a_budget_gives_does_not_depend_on_earlier_choices():
  w, x = jnp.ones((2, 64, 64)), jnp.ones((256, 64))

  def loss(w, x):
    for one in w:
      x = jnp.tanh(jnp.sin(x @ one)) * x
    return jnp.sum(x)

  options = make_options(None, memory_budget=0.5)
  chooser = TracedFunction(loss, (w, x), 0, options)._chooser()
  rng = random.Random(0)
  held: list[object] = []  # So that cuts get the memory of earlier ones.
  found = set()
  for _ in range(1000):
    budget = rng.randrange(1, 65) / 64
    cut = chooser._trade.choose_cut(budget)
    assert [*chooser.choose(budget).saved] == cut.saved
    held.append(cut)
    if len(held) > 9:
      held.pop(rng.randrange(9))
    found.add(tuple(cut.saved))
  assert len(found) > 2


def test_a_smaller_budget_repeats_more_up_to_jax_checkpoint():
  costs = [
    flops(compress_residuals(loss, memory_budget=share))
    for share in (1.0, 0.3, 0)
  ]
  assert costs == sorted(costs)
  assert costs[-1] <= 1.01 * flops(checkpointed(attend))
  (carry,) = [r for r in saved(memory_budget=0) if r.repeats == 4]
  assert carry.shape == (8, 1024, 1024)


def test_a_codec_is_charged_for_its_passes_and_slow_memory_for_its_bytes():
  """Encoded scores take two more passes over memory than recomputing them."""
  encoded = saved(codec=uniform(bits=8))
  assert (8, 16, 1024, 1024) not in [r.shape for r in encoded]
  assert total_bytes(encoded) < 0.6 * total_bytes(saved())
  slow = dataclasses.replace(H100, memory_rate=gbyte_per_s(335))
  found = [residuals_of(loss, *shapes(), device=d) for d in (slow, H100)]
  sizes = [total_bytes(residuals) for residuals in found]
  assert sizes[0] < sizes[1]


def test_one_barrier_lies_between_two_products():
  """A barrier writes what it ties, and so ends the softmax's fusion."""
  cut = lambda a: jax.ShapeDtypeStruct(a.shape[1:], a.dtype)
  layer = jax.tree.map(cut, shapes()[0])
  both = jax.grad(lambda w, x: jnp.sum(compress_residuals(attend)(w, x)))
  text = str(jax.make_jaxpr(both)(layer, shapes()[1]))
  products = text.count("dot_general[")
  assert 10 < products and text.count("optimization_barrier") < 2 * products


def attend_in_blocks(w, x):
  """One layer whose attention is a loop over blocks of keys."""
  q, k, v = jnp.split(x @ w["qkv"], 3, axis=-1)
  blocks = tuple(jnp.stack(jnp.split(a, 8, axis=1)) for a in (k, v))

  def add_block(carry, block):
    keys, values = block
    scores = jnp.exp(jnp.einsum("btd,bsd->bts", q, keys).astype(jnp.float32))
    seen = jnp.einsum("bts,bsd->btd", scores.astype(x.dtype), values)
    return (carry[0] + seen, carry[1] + jnp.sum(scores, -1)), None

  zeros = jnp.zeros_like(x), jnp.zeros(x.shape[:2], jnp.float32)
  (seen, total), _ = lax.scan(add_block, zeros, blocks)
  x = x + (seen / total[..., None].astype(x.dtype)) @ w["out"]
  return x + jax.nn.gelu(x @ w["up"]) @ w["down"]


def loss_in_blocks(w, x):
  x, _ = lax.scan(lambda x, w: (attend_in_blocks(w, x), None), x, w)
  return jnp.mean(x.astype(jnp.float32) ** 2)


def saved_in_blocks(**options):
  found = residuals_of(loss_in_blocks, *shapes(), **options)
  inner = [r for r in found if "scan_0/scan_0/" in r.name]
  return inner, total_bytes(found)


def test_a_loop_in_a_loop_may_run_again_while_other_results_are_saved():
  inner, whole = saved_in_blocks(memory_budget=1.0)
  assert inner
  inner, least = saved_in_blocks(memory_budget=0)
  assert not inner
  inner, part = saved_in_blocks(memory_budget=0.2)
  # Outside of the loops, only the carry is saved, whatever the budget.
  carry = 2 * 8 * 1024**2
  assert not inner and least < part <= 0.2 * whole + carry
  _, few = saved_in_blocks(memory_budget=part)
  assert 0.9 * part <= few <= part
  # No matmul runs more than twice.
  ours = flops(compress_residuals(loss_in_blocks, memory_budget=0))
  assert ours <= 1.01 * flops(checkpointed(attend_in_blocks))


# Without a loop in a loop: tests/planner/residuals.
def test_gradients_do_not_depend_on_the_budget():
  keys = iter(jax.random.split(jax.random.key(0), 9))
  args = jax.tree.map(
    lambda a: 0.1 * jax.random.normal(next(keys), a.shape),
    shapes(layers=2, batch=2, length=16, width=64, dtype="float32"),
  )
  ours = compress_residuals(loss_in_blocks, memory_budget=0.2)
  expected, found = (gradients(fn, *args) for fn in (loss_in_blocks, ours))
  assert distance(expected, found) < 1e-5


def normalize(x):
  x = x - jnp.mean(x, 0, keepdims=True)
  return x * lax.rsqrt(jnp.mean(x**2, 0, keepdims=True) + 1e-5)


def add_branches(w, x):
  """A block whose ReLU reads the sum of two cheap products."""
  return jax.nn.relu(normalize(x @ w[0]) + normalize(x @ w[1]))


def test_masks_of_a_sum_are_saved_unless_its_products_run_again():
  w = jax.ShapeDtypeStruct((7, 2, 64, 64), "float32")
  x = jax.ShapeDtypeStruct((65536, 64), "float32")
  int4 = uniform(bits=4, block=64)

  def stack(w, x):
    return lax.scan(lambda x, w: (add_branches(w, x), None), x, w)[0]

  def large(**options):
    found = residuals_of(stack, w, x, **options)
    return {r.kind for r in found if r.shape == x.shape}

  assert large(codec=int4) == {"dense", "mask"}
  assert large(codec=int4, memory_budget=0.0) == {"dense"}


def test_no_subset_of_the_large_values_of_a_layer_is_much_faster_in_a_budget():
  shapes_of_all, x = shapes()
  w = [
    jax.ShapeDtypeStruct(a.shape[1:], a.dtype) for a in shapes_of_all.values()
  ]

  def layer(*args):
    *w, x = args
    return [attend(dict(zip(shapes_of_all, w, strict=True)), x)], ()

  joint = trace_joint(layer, [*w, x], [jax.core.ShapedArray(x.shape, x.dtype)])
  names = [*shapes_of_all, "x"]
  table = ResidualTable(joint, names, make_choice(None), "", 4)
  trade = Trade(joint, frozenset(joint.inputs[:-1]), table, H100)
  fastest = trade.choose_cut(1.0)
  always = {*joint.inputs, *joint.program.constants}
  free = [
    v
    for v in fastest.saved
    if array_bytes(v.aval) > 1 << 20 and v not in always
  ]
  assert len(free) > 4
  for flags in itertools.product((False, True), repeat=len(free)):
    missing = set(itertools.compress(free, flags))
    saved = [v for v in fastest.saved if v not in missing]
    cut = trade.price(saved)
    found = trade.choose_cut((cut.nbytes + 1) / (fastest.nbytes + 1))
    assert found.nbytes <= max(cut.nbytes + 1, trade.choose_cut(0).nbytes)
    assert trade.predict(found)[0] <= 1.02 * trade.predict(cut)[0]


def test_what_is_compared_with_infinity_may_be_computed_again():
  def softplus_loss(w, x):
    def run_layer(x, w):
      return x + jax.nn.softplus(x @ w[0]) @ w[1], None

    return jnp.sum(lax.scan(run_layer, x, w)[0] ** 2)

  like = jax.ShapeDtypeStruct
  w = like((3, 2, 64, 64), "float32")
  x = like((4096, 64), "float32")
  for budget in (None, 1.0, 0.0):
    found = residuals_of(softplus_loss, w, x, memory_budget=budget)
    assert [r.name for r in found if r.kind == "mask"] == []


def test_of_equal_bytes_budget_0_saves_what_takes_least_time():
  """The sums of a norm take few bytes, and twice to read what they are of."""

  def norm_loss(w, x):
    def run_layer(x, w):
      size = lax.rsqrt(jnp.mean(x**2, -1, keepdims=True) + 1e-6)
      return x + jax.nn.gelu(x * size @ w[0]) @ w[1], None

    return jnp.sum(lax.scan(run_layer, x, w)[0] ** 2)

  like = jax.ShapeDtypeStruct
  w = like((3, 2, 1024, 1024), "float32")
  x = like((4096, 1024), "float32")
  found = residuals_of(norm_loss, w, x, memory_budget=0)
  of_loop = [r.shape for r in found if r.repeats == 3]
  assert sorted(of_loop) == [(4096, 1), (4096, 1024)]
