"""`fit_memory` finds the fastest plan that compiles within the budget."""

import dataclasses
import functools
import types

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.experimental import io_callback

from jaxmotion import codecs, memory, perfmodel, planner
from jaxmotion.core import tree_bytes
from jaxmotion.memory import compress_residuals, offload, recompute
from jaxmotion.perfmodel import builtin_platform, predict_cost, predict_seconds
from jaxmotion.planner.residuals import _prices, _recipe, _search, _select

INT8 = codecs.uniform(bits=8)
H100 = builtin_platform("h100_node")
# Without a time per kernel, tiny arrays cost in proportion to their size, as
# large ones do.
DEVICE = dataclasses.replace(H100.device, kernel_s=0.0)
PLATFORM = dataclasses.replace(H100, device=DEVICE)


def like(*shape):
  return jax.ShapeDtypeStruct(shape, "float32")


def mlp(params, x):
  def layer(h, p):
    return h + jnp.tanh(h @ p["a"]) @ p["b"], None

  return jnp.mean(lax.scan(layer, x, params)[0] ** 2)


def flat_mlp(params, x):
  """The same without a loop, whose stacks make plain steps slow."""
  for a, b in zip(params["a"], params["b"], strict=True):
    x = x + jnp.tanh(x @ a) @ b
  return jnp.mean(x**2)


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
    scores = checkpoint_name(jnp.einsum("bqhk,bthk->bhqt", q, k), "scores")
    out = jnp.einsum("bhqt,bthk->bqhk", jax.nn.softmax(scores), v)
    return h + checkpoint_name(out, "out").reshape(h.shape), None

  return jnp.mean(lax.scan(layer, x, params)[0] ** 2)


MODELS = {
  "mlp": (mlp, {"a": like(8, 32, 64), "b": like(8, 64, 32)}, like(128, 32)),
  "flat": (
    flat_mlp,
    {"a": like(8, 32, 64), "b": like(8, 64, 32)},
    like(128, 32),
  ),
  # The inputs of its layers take more memory than its parameters.
  "wide": (mlp, {"a": like(8, 32, 64), "b": like(8, 64, 32)}, like(4096, 32)),
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


def search_all(prices, options=(), **limits):
  search = _search.RecipeSearch(prices, options, may_recompute=True)
  search.begin(**limits)
  search.extend()
  return search


@functools.cache
def searched(model, *options):
  """The priced recipes of a model."""
  fn, *args = MODELS[model]
  return search_all(_prices.StepPrices(fn, args, PLATFORM), options)


def predict(model, wrap):
  """Predicted seconds and bytes of the step of a wrapped model."""
  fn, *args = MODELS[model]
  cost = predict_cost(jax.value_and_grad(wrap(fn)), *args)
  return predict_seconds(cost, PLATFORM.device), cost.peak_bytes


def list_hand_written():
  """Some plans that a user may think of, of the attention."""
  every = functools.partial(compress_residuals, params=(0, 1))
  for share in (0.9, 0.45, 0.2, 0.0, None):
    yield functools.partial(every, memory_budget=share)
  policies = jax.checkpoint_policies
  yield functools.partial(every, codec=memory.save_only_these_names("scores"))
  yield functools.partial(every, codec=[("/scores$", recompute())])
  for policy in (
    None,
    policies.dots_saveable,
    policies.dots_with_no_batch_dims_saveable,
    policies.save_only_these_names("scores"),
    policies.save_anything_except_these_names("scores"),
  ):
    yield functools.partial(jax.checkpoint, policy=policy)
    yield functools.partial(_recipe.checkpoint_loops, policy=policy)


def test_no_plan_by_hand_is_faster():
  by_hand = [predict("attention", wrap) for wrap in list_hand_written()]
  search = searched("attention")
  sizes = sorted({nbytes for _, nbytes in by_hand})
  for budget in {sizes[i * (len(sizes) - 1) // 2] for i in range(3)}:
    best_s = min(step_s for step_s, nbytes in by_hand if nbytes <= budget)
    plan = _select.select_fastest(search, budget, None)
    assert plan.predicted_bytes <= budget
    assert plan.step_s <= 1.01 * best_s
    # The plan is what its words say.
    found = predict("attention", plan.wrap)
    assert found == (plan.step_s, plan.predicted_bytes)


def test_budgets_are_refined_though_the_smallest_holds_more():
  def price(recipe):
    share = recipe.memory_budget
    if recipe.kind != "cut" or share is None:
      return _prices.Price(1.0, 10_000)
    # What is recomputed at once takes memory, too.
    return _prices.Price(3 - share, 1000 * share if share > 0.05 else 900)

  prices = types.SimpleNamespace(
    price=price,
    landmarks=_recipe.Landmarks((), False),
    list_residuals=lambda r: [],
  )
  search = search_all(prices)
  for most in (180, 700):
    search.refine(most)
    fits = [c for c in search.candidates if c.device_bytes <= most]
    assert 0.9 * most <= fits[0].device_bytes


# Seconds, predicted bytes and compiled bytes; the budget is 600.
@pytest.mark.parametrize(
  ("sent", "kept"),
  [((1.1, 500, 800), (1.2, 550, 560)), ((1.4, 500, 590), (1.2, 700, 560))],
)
def test_memory_that_transfers_need_says_nothing_of_other_plans(sent, kept):
  recipes = [
    _recipe.make_cut(0.7, (("", offload()),)),
    _recipe.make_cut(0.6),
    _recipe.make_cut(0.5),
  ]
  figures = dict(zip(recipes, (sent, kept, (1.5, 400, 410)), strict=True))
  plain = _search.Candidate(_recipe.PLAIN, 1.0, 1000)
  tried = [plain, *(_search.Candidate(r, *f[:2]) for r, f in figures.items())]
  search = types.SimpleNamespace(
    candidates=sorted(tried, key=lambda c: c.step_s),
    plain=plain,
    is_over=False,
    extend=lambda: None,
    refine=lambda most_bytes: None,
    prices=types.SimpleNamespace(
      make_step=lambda recipe: recipe,
      report=lambda line: None,
      args=(),
      state_bytes=0,
    ),
  )
  selector = _select.Selector(search, 600, lambda recipe: figures[recipe][2])
  assert selector.find_best() == tried[2]
  assert list(selector.compiled) == recipes[:2]


@pytest.mark.parametrize("excess", [0.8, 1.4])
def test_few_compilations_find_a_plan_within_the_budget(excess):
  """The compiler may need another number of bytes than predicted."""
  search = searched("attention")
  compiled = {}

  def measure(step, *args):
    nbytes = int(excess * predict_cost(step, *args).peak_bytes)
    text = str(jax.make_jaxpr(step)(*args))
    assert text not in compiled
    compiled[text] = nbytes
    return nbytes

  plain = excess * search.plain.device_bytes
  for share in (0.9, 0.6):
    compiled.clear()
    plan = _select.select_fastest(search, share * plain, measure)
    assert plan.compiled_bytes <= share * plain
    assert len(compiled) <= 3
    # What `wrap` returns is what was compiled.
    fn, *args = MODELS["attention"]
    step = jax.value_and_grad(plan.wrap(fn))
    text = str(jax.make_jaxpr(step)(*args))
    assert compiled[text] == plan.compiled_bytes


def test_a_refusal_states_the_least_bytes():
  search = searched("mlp")
  least = min(c.device_bytes for c in search.candidates)
  with pytest.raises(planner.BudgetTooSmallError, match="predicted") as refused:
    _select.select_fastest(search, least - 1, None)
  assert refused.value.least_bytes == least
  assert _select.select_fastest(search, least, None).predicted_bytes == least
  with pytest.raises(planner.BudgetTooSmallError, match="by `meas") as refused:
    _select.select_fastest(search, least, lambda *args: 2 * least)
  assert refused.value.least_bytes == 2 * least


def test_a_compiled_figure_names_its_backend_and_its_unit():
  fn, *args = MODELS["mlp"]
  plan = planner.fit_memory(fn, args[0], (args[1],), PLATFORM, 1e9)
  said = " compiled for cpu: "
  assert said in str(plan)
  with pytest.raises(planner.BudgetTooSmallError) as refused:
    planner.fit_memory(fn, args[0], (args[1],), PLATFORM, 1e3)
  least = refused.value.least_bytes
  said = f"{least / 1e3:.3g} kB ({least} bytes, compiled for cpu), got 1 kB."
  assert said in str(refused.value)


def test_a_cpu_compiles_nothing_without_loops():
  lines = []
  measure = planner.program_memory_bytes
  flat = lambda params, x: jnp.mean(jnp.tanh(x @ params["a"][0]) ** 2)
  plan = fit(flat, 1e9, lines, measure_memory=measure)
  assert plan.compiled_bytes is None and "nothing of functions" in str(plan)
  assert not any("compiling" in line for line in lines)
  with pytest.raises(planner.BudgetTooSmallError, match="bytes, predicted"):
    fit(flat, 10, measure_memory=measure)


def test_nothing_is_changed_where_the_plain_step_fits():
  plan = _select.select_fastest(searched("flat"), 1e12, None)
  fn = MODELS["flat"][0]
  assert plan.name == "plain" and plan.wrap(fn) is fn
  assert plan.added_s == 0 and plan.fastest_stock.name == "plain"
  assert "no other is faster" in str(plan)


def test_a_plan_says_which_stock_policy_it_beats():
  search = searched("conv")
  texts = set()
  for budget in sorted({c.device_bytes for c in search.candidates}):
    plan = _select.select_fastest(search, budget, None)
    stock = plan.fastest_stock
    fitting = [s for s in plan.stock if s.device_bytes <= budget]
    assert stock.step_s == min(s.step_s for s in fitting) >= plan.step_s
    is_stock = stock.name == plan.name
    text = "no other is faster" if is_stock else f"{stock.name}, takes"
    assert text in str(plan)
    texts.add(is_stock)
  assert texts == {True, False}


def test_the_stock_policy_that_a_plan_names_is_compiled():
  search = searched("conv")
  trusted = (
    _select.select_fastest(search, c.device_bytes, None)
    for c in search.candidates
  )
  plan = next(p for p in trusted if "jax.checkpoint that fits" in str(p))
  assert not plan.fastest_stock.is_compiled and "B, predicted." in str(plan)
  measured = []

  def measure(step, *args):
    measured.append(predict_cost(step, *args).peak_bytes)
    return measured[-1]

  plan = _select.select_fastest(search, plan.budget_bytes, measure)
  stock = plan.fastest_stock
  assert stock.is_compiled and stock.name != plan.name
  assert [stock.device_bytes] == measured[-1:]
  assert "B, by `measure_memory`." in str(plan)


def test_a_codec_fits_where_no_stock_policy_does():
  search = searched("wide", INT8)
  traced = [c for c in search.candidates if not c.is_estimate]
  least = min(c.device_bytes for c in traced)
  plan = _select.select_fastest(search, least, None)
  assert plan.fastest_stock is None and "Neither the plain step" in str(plan)
  assert INT8 in [row.codec for row in plan.rows]


def test_lossless_plans_change_no_gradient():
  fn, params, x = MODELS["attention"]
  rng = np.random.default_rng(0)
  draw = lambda a: jnp.asarray(0.1 * rng.normal(size=a.shape), a.dtype)
  args = jax.tree.map(draw, (params, x))
  plain = jax.jit(jax.value_and_grad(fn))(*args)
  search = searched("attention")
  kinds = {c.recipe.kind: c for c in search.candidates}
  assert kinds.keys() == {"plain", "stock", "cut"}
  looped = next(c for c in search.candidates if c.recipe.in_loops)
  for candidate in (looped, kinds["cut"]):
    step = jax.jit(search.prices.make_step(candidate.recipe))
    ours = jax.tree.leaves(step(*args))
    for a, b in zip(ours, jax.tree.leaves(plain), strict=True):
      # Sums of another order differ by roundings of the greatest elements.
      atol = 1e-6 * np.abs(b).max()
      np.testing.assert_allclose(a, b, rtol=1e-5, atol=atol)


def fit(fn, budget, lines=None, **options):
  """Fits a function of the arrays of the small model."""
  _, params, x = MODELS["mlp"]
  options = {"measure_memory": None, "options": [recompute()], **options}
  progress = None if lines is None else lines.append
  options["progress"] = progress
  return planner.fit_memory(fn, params, (x,), PLATFORM, budget, **options)


def test_the_function_is_traced_a_few_times_only():
  count = 0
  lines = []

  def counted(params, x):
    nonlocal count
    count += 1
    return mlp(params, x)

  measure = planner.program_memory_bytes
  plan = fit(counted, 1e9, lines, measure_memory=measure)
  assert count <= 8 <= len(lines)
  compiled = [line for line in lines if "compiling" in line]
  # Also the policy of `jax.checkpoint` that the plan is compared with.
  asked = plan.name, plan.fastest_stock.name
  assert compiled == [f"compiling: {name}" for name in asked]
  assert plan.compiled_bytes is not None and plan.fastest_stock.is_compiled


def test_another_budget_of_a_function_prices_no_plan_again():
  fn = lambda params, x: flat_mlp(params, x)
  state_bytes = tree_bytes(MODELS["mlp"][1])

  def fit_again(budget, **options):
    lines = []
    options["options"] = [offload(INT8), offload(), recompute()]
    plan = fit(fn, budget, lines, **options)
    return plan, sum(line.startswith("predicted: ") for line in lines)

  found = map(fit_again, (5e5, 1.1e6, 5e5))
  (tight, priced), (loose, more), (again, rest) = found
  assert priced >= 8 and more == rest == 0
  assert (tight.name, tight.step_s) == (again.name, again.step_s)
  assert tight.name != loose.name == "plain"
  # With an optimizer, prices have other bytes.
  momentum = optax.sgd(0.1, 0.9)
  other, priced = fit_again(5e5 + state_bytes, optimizer=momentum)
  assert priced >= 8 and other.state_bytes == state_bytes


def test_a_time_limit_ends_the_search():
  lines, found = [], searched("mlp", offload())
  plan = fit(
    lambda *args: mlp(*args),
    found.plain.device_bytes - 1,
    lines,
    options=[offload(), recompute()],
    time_limit_s=1e-6,
  )
  assert plan.name != "plain"
  # A line tells each price of a kind once.
  traced = [c for c in found.candidates if not c.is_estimate]
  assert 0 < len(lines) < len({(c.recipe.kind, *c[1:]) for c in traced})


def test_other_results_and_optimizer_state_have_their_place():
  def with_aux(params, x):
    loss = flat_mlp(params, x)
    return loss, {"loss": loss, "count": jnp.zeros((), "int32")}

  _, params, x = MODELS["mlp"]
  tx = optax.adam(1e-3)
  state = jax.eval_shape(tx.init, params)
  plan = fit(with_aux, 1e9, has_aux=True, optimizer=tx)
  assert plan.state_bytes == tree_bytes(state) > tree_bytes(params)
  tight = plan.predicted_bytes - 1
  less = fit(with_aux, tight, has_aux=True, optimizer=tx)
  assert less.name != plan.name == "plain"
  value, aux = jax.eval_shape(less.wrap(with_aux), params, x)
  assert value.shape == () and aux.keys() == {"loss", "count"}
  # Without the state, the plain step fits.
  assert fit(with_aux, tight, has_aux=True).name == "plain"


@pytest.mark.parametrize("memory_kind", [None, "pinned_host"])
def test_moments_on_the_host_do_not_count(memory_kind):
  params, x = like(256, 256), like(64, 256)
  tx = memory.adamw_8bit(1e-3, memory_kind=memory_kind)
  plan = planner.fit_memory(square, params, (x,), PLATFORM, 1e9, optimizer=tx)
  state = tree_bytes(jax.eval_shape(tx.init, params))
  # Two numbers of steps stay on the device.
  assert plan.state_bytes == (8 if memory_kind else state)


def square(params, x):
  return jnp.mean(jnp.tanh(jnp.tanh(x @ params) @ params.T) ** 2)


W, X = like(64, 64), like(64, 64)


def printed(w, x):
  io_callback(print, None, x[0, 0])
  return square(w, x)


@pytest.mark.parametrize(
  ("fn", "has_aux", "error"),
  [
    (lambda w, x: x @ w, False, "must return a floating-point.*has_aux"),
    (square, True, "must return a pair"),
    (lambda w, x: (x @ w, 1), True, "must return a floating-point"),
    (printed, False, "must have no side effects"),
  ],
)
def test_a_function_that_is_no_pure_scalar_is_refused(fn, has_aux, error):
  with pytest.raises(ValueError, match=f"`fn` {error}"):
    planner.fit_memory(fn, W, (X,), PLATFORM, 1e9, has_aux=has_aux)


def test_codecs_with_state_and_arrays_of_integers_are_refused():
  for codec in (codecs.feedback(INT8), offload(codecs.feedback(INT8))):
    with pytest.raises(
      (ValueError, TypeError), match="must be .*without state"
    ):
      planner.fit_memory(square, W, (X,), PLATFORM, 1e9, options=[codec])
  tree = {"w": W, "table": jax.ShapeDtypeStruct((3,), "int32")}
  with pytest.raises(TypeError, match=r"`params/table` must .*got int32\[3\]"):
    planner.fit_memory(lambda p, x: square(p["w"], x), tree, (X,), PLATFORM, 1)


def test_policies_that_offload_are_tried_where_arrays_may_leave():
  assert not any(c.recipe.is_on_host for c in searched("mlp").candidates)
  sent = searched("mlp", offload()).candidates
  assert any(c.recipe.is_on_host for c in sent)
  slow = dataclasses.replace(H100.to_host, rate=perfmodel.gbyte_per_s(1e-3))
  tethered = dataclasses.replace(PLATFORM, to_host=slow, sources={})
  fn, *args = MODELS["attention"]
  near, far = (_prices.StepPrices(fn, args, p) for p in (PLATFORM, tethered))
  recipes = list(_recipe.list_offload_recipes(near.landmarks))
  assert len(recipes) == 2
  scores = 4 * 4 * 4 * 2 * 32 * 32  # Of all that have names, what is read.
  for recipe in recipes:
    step_s, far_s = (prices.price(recipe).step_s for prices in (near, far))
    assert far_s > step_s
    if "names" in recipe.name:
      link_s = slow.transfer_seconds(scores)
      assert link_s - step_s < far_s - step_s < link_s
    step = near.make_step(recipe)
    assert "<host>" in str(jax.make_jaxpr(step)(*args))


def test_without_a_link_to_a_host_nothing_goes_there():
  no_host = dict(to_host=None, from_host=None, sources={})
  alone = dataclasses.replace(PLATFORM, **no_host)
  plan = planner.fit_memory(square, W, (X,), alone, 1e9, measure_memory=None)
  assert plan.host_bytes == 0
  assert "has no link to a host" in plan.notes[0]
  assert plan.notes[0] in str(plan)


def test_names_do_not_depend_on_how_loops_save_residuals():
  fn, *args = MODELS["mlp"]
  plain, coded = (
    [r.name for r in memory.residuals_of(fn, *args, codec=codec, params=(0, 1))]
    for codec in (None, INT8)
  )
  assert plain == coded
