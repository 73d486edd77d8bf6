"""`fit_memory` finds the fastest plan that compiles within the budget."""

import dataclasses
import functools
import itertools
import zlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import io_callback

from jaxmotion import codecs, planner
from jaxmotion.memory import offload, recompute, residuals_of
from jaxmotion.perfmodel import builtin_platform, gbyte_per_s
from jaxmotion.planner.residuals._costs import ResidualCosts
from jaxmotion.planner.residuals._enumerate import list_candidates
from jaxmotion.planner.residuals._select import select_fastest

INT8 = codecs.uniform(bits=8)
H100 = builtin_platform("h100_node")
# Without a time per kernel, tiny arrays cost in proportion to their size, as
# large ones do.
PLATFORM = dataclasses.replace(
  H100, device=dataclasses.replace(H100.device, kernel_s=0.0)
)


def like(*shape):
  return jax.ShapeDtypeStruct(shape, "float32")


def mlp(params, x):
  def layer(h, p):
    return h + jnp.tanh(h @ p["a"]) @ p["b"], None

  return jnp.mean(lax.scan(layer, x, params)[0] ** 2)


def conv(params, x):
  def layer(h, p):
    dims = ("NHWC", "HWIO", "NHWC")
    for w in (p["a"], p["b"]):
      h += lax.conv_general_dilated(
        jax.nn.relu(h), w, (1, 1), "SAME", dimension_numbers=dims
      )
    return h, None

  return jnp.mean(lax.scan(layer, x, params)[0] ** 2)


def attention(params, x):
  def layer(h, p):
    q, k, v = (jnp.einsum("btd,dhk->bthk", h, p[c]) for c in "qkv")
    share = jax.nn.softmax(jnp.einsum("bqhk,bthk->bhqt", q, k))
    return h + jnp.einsum("bhqt,bthk->bqhk", share, v).reshape(h.shape), None

  return jnp.mean(lax.scan(layer, x, params)[0] ** 2)


MODELS = {
  "mlp": (mlp, {"a": like(8, 32, 64), "b": like(8, 64, 32)}, like(128, 32)),
  "conv": (
    conv,
    {"a": like(6, 3, 3, 8, 8), "b": like(6, 3, 3, 8, 8)},
    like(4, 12, 12, 8),
  ),
  # So many residuals that not every set of them is tried.
  "attention": (
    attention,
    {c: like(4, 32, 2, 16) for c in "qkv"},
    like(4, 32, 32),
  ),
}


@functools.cache
def searched(model, *options):
  """The costs and the candidates of a model."""
  fn, *args = MODELS[model]
  costs = ResidualCosts(fn, args, PLATFORM, options)
  return costs, list_candidates(costs, may_recompute=True)


@pytest.mark.parametrize(
  "model, options, share",
  [("mlp", [INT8], 0.7), ("conv", [], 0.8), ("attention", [], 0.7)],
)
def test_few_compilations_find_a_plan_within_the_budget(model, options, share):
  figures = {}

  def measure(step, *args):
    text = str(jax.make_jaxpr(step)(*args))
    if text not in figures:
      figures[text] = planner.program_memory_bytes(step, *args)
    return figures[text]

  found = searched(model, *options)
  fastest = select_fastest(*found, 1e12, measure, ())
  budget = share * fastest.compiled_bytes
  plan = select_fastest(*found, budget, measure, ())
  assert plan.compiled_bytes <= budget
  assert len(figures) < 6
  assert plan.step_s >= fastest.step_s
  # What `wrap` returns is what was compiled.
  fn, *args = MODELS[model]
  step = jax.value_and_grad(plan.wrap(fn))
  assert figures[str(jax.make_jaxpr(step)(*args))] == plan.compiled_bytes


@pytest.mark.parametrize("seed", range(3))
def test_a_budget_is_met_by_the_only_plan_that_can(seed):
  """A compiler may need any memory for temporaries, whatever is predicted."""
  costs, found = searched("mlp")
  figures = {}

  def measure(step, *args):
    text = str(jax.make_jaxpr(step)(*args))
    figures[text] = zlib.crc32(f"{seed} {text}".encode())
    return figures[text]

  with pytest.raises(planner.BudgetTooSmallError) as refused:
    select_fastest(costs, found, 1.0, measure, ())
  least = refused.value.least_bytes
  assert least == min(figures.values())
  # One program for each recomputed set, except sets that save the same.
  assert len(figures) > 8
  tried = len(figures)
  plan = select_fastest(costs, found, least, measure, ())
  assert plan.compiled_bytes == least
  assert len(figures) == tried


def test_the_choice_is_as_good_as_the_best_of_all():
  def chain(params, x):
    for w in params:
      x = jnp.tanh(x @ w)
    return jnp.mean(x**2)

  fast_link = dataclasses.replace(
    PLATFORM.to_host, rate=gbyte_per_s(500), latency_s=0.0
  )
  platform = dataclasses.replace(
    PLATFORM, to_host=fast_link, from_host=fast_link, sources={}
  )
  # Of three sizes: one action for all is not the best.
  args = [[like(64, 32), like(32, 128), like(128, 64)], like(256, 64)]
  costs = ResidualCosts(chain, args, platform, [INT8, offload()])
  found = list_candidates(costs, may_recompute=True)
  every = []
  names = [r.name for r in costs.trace_variant().residuals]
  assert len(names) == 3
  for actions in itertools.product(
    (None, INT8, offload(), recompute()), repeat=3
  ):
    rules = [(f"{n}$", a) for n, a in zip(names, actions, strict=True)]
    recomputed = frozenset(n for n, a in rules if isinstance(a, recompute))
    saved = costs.list_residuals(rules)
    nbytes = sum(r.encoded_bytes * r.repeats for r in saved if not r.on_host)
    every.append((nbytes, costs.step_seconds(recomputed, saved)))
  fixed = costs.argument_bytes + costs.gradient_bytes + costs.temporary_bytes
  sizes = sorted({nbytes for nbytes, _ in every})
  assert len(sizes) > 10
  for nbytes in sizes[:: len(sizes) // 6]:
    best = min(step_s for n, step_s in every if n <= nbytes)
    plan = select_fastest(costs, found, fixed + nbytes, None, ())
    assert plan.predicted_bytes <= fixed + nbytes
    assert plan.step_s <= 1.1 * best


def test_stages_get_actions_of_their_own():
  def layer(h, w):
    return h + jnp.tanh(h @ w) @ w.T, None

  def fn(params, x):
    h, _ = lax.scan(layer, x, params[0])
    return jnp.mean(lax.scan(layer, h, params[1])[0] ** 2)

  device = dataclasses.replace(
    PLATFORM.device, matmul_flops_per_s={"float32": 1e12}
  )
  slow = dataclasses.replace(PLATFORM, device=device)
  costs = ResidualCosts(
    fn, [[like(4, 16, 64), like(2, 16, 64)], like(64, 16)], slow, []
  )
  found = list_candidates(costs, may_recompute=True)
  most = select_fastest(costs, found, 1e12, None, ())
  less = select_fastest(costs, found, most.predicted_bytes - 1, None, ())
  wide = [r for r in less.rows if r.name.endswith("tanh_0")]
  # The shorter stage saves enough, and takes less time to recompute.
  assert {r.name: r.action for r in wide} == {
    "dense/scan_0/tanh_0": "keep",
    "dense/scan_1/tanh_0": "recompute",
  }
  assert [r.full_bytes for r in wide] == [4 * 64 * 64 * 4, 2 * 64 * 64 * 4]
  assert less.residual_bytes == most.residual_bytes - wide[1].full_bytes
  assert less.step_s > most.step_s


def test_lossless_plans_change_no_gradient():
  fn, params, x = MODELS["mlp"]
  plan = select_fastest(*searched("mlp", INT8), 5e5, None, ())
  lossless = [r for r in plan.rules if not isinstance(r[1], codecs.Codec)]
  assert lossless and len(lossless) == len(plan.rules)
  rng = np.random.default_rng(0)
  args = jax.tree.map(
    lambda a: jnp.asarray(0.1 * rng.normal(size=a.shape), a.dtype), (params, x)
  )
  ours = jax.jit(jax.value_and_grad(plan.wrap(fn)))(*args)
  plain = jax.jit(jax.value_and_grad(fn))(*args)
  for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(plain), strict=True):
    # Sums of another order differ by roundings of the greatest elements.
    atol = 1e-6 * np.abs(b).max()
    np.testing.assert_allclose(a, b, rtol=1e-5, atol=atol)


def square(params, x):
  return jnp.mean(jnp.tanh(jnp.tanh(x @ params) @ params.T) ** 2)


W, X = like(64, 64), like(64, 64)


@pytest.mark.parametrize("budget", [0, -1.0, float("inf"), float("nan")])
def test_a_budget_is_positive(budget):
  with pytest.raises(
    ValueError, match=r"`budget_bytes` .* in \(0, 1e\+18\], got"
  ):
    planner.fit_memory(square, W, (X,), PLATFORM, budget)


@pytest.mark.parametrize(
  "given, error",
  [
    ({"budget_bytes": "1GB"}, "`budget_bytes` must be a number in .*'1GB'"),
    ({"platform": "h100"}, "`platform` must be a perfmodel.Platform"),
    ({"options": ["int8"]}, "`options` must be codecs"),
    ({"batch": X}, "`batch` must be a tuple of .*, got a ShapeDtypeStruct"),
  ],
)
def test_arguments_of_another_type_are_refused(given, error):
  given = {"batch": (X,), "budget_bytes": 1e9, "platform": PLATFORM, **given}
  with pytest.raises(TypeError, match=error):
    planner.fit_memory(square, W, **given)


def test_a_function_that_returns_no_scalar_is_refused():
  with pytest.raises(ValueError, match="`fn` must return a floating-point"):
    planner.fit_memory(lambda w, x: x @ w, W, (X,), PLATFORM, 1e9)


def test_a_function_with_side_effects_is_refused():
  def printed(w, x):
    io_callback(print, None, x[0, 0])
    return square(w, x)

  with pytest.raises(ValueError, match="must have no side effects"):
    planner.fit_memory(printed, W, (X,), PLATFORM, 1e9)


@pytest.mark.parametrize("wrap", [lambda codec: codec, offload])
def test_a_codec_with_state_is_refused(wrap):
  options = [recompute(), wrap(codecs.feedback(INT8))]
  with pytest.raises((ValueError, TypeError), match=r"must be .*without state"):
    planner.fit_memory(square, W, (X,), PLATFORM, 1e9, options=options)


def test_without_a_link_to_a_host_nothing_goes_there():
  alone = dataclasses.replace(
    PLATFORM, to_host=None, from_host=None, sources={}
  )
  plan = planner.fit_memory(square, W, (X,), alone, 1e9, measure_memory=None)
  assert plan.host_bytes == 0
  assert "has no link to a host" in plan.notes[0]
  assert plan.notes[0] in str(plan)


def test_names_do_not_depend_on_how_loops_save_residuals():
  fn, *args = MODELS["mlp"]
  plain, coded = (
    [r.name for r in residuals_of(fn, *args, codec=codec, params=(0, 1))]
    for codec in (None, INT8)
  )
  assert plain == coded
