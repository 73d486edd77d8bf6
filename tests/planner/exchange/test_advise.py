"""`advise` finds the shortest step within the budget, and explains it."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AbstractMesh, AxisType, PartitionSpec as P

import jaxmotion
from jaxmotion import codecs, perfmodel, planner, wire
from jaxmotion.core import to_varying
from jaxmotion.perfmodel import predict_step
from jaxmotion.planner.exchange._errors import bound_errors, measure_errors
from tests.planner.problems import (
  BATCH,
  PARAMS,
  THREE,
  WORK,
  cluster,
  every_choice,
  gradients,
  loss,
  rules_of,
)

SLOW, FAST = cluster(8, gbit=0.1), cluster(8, gbit=10_000, latency_s=1e-6)
INT4 = codecs.feedback(codecs.uniform(bits=4))


def advise(platform, **options):
  options = {"candidates": THREE[1:], **options}
  return planner.advise(WORK, PARAMS, (), platform, **options)


def list_steps(platform, **options):
  """Seconds of the steps of all choices, by the performance model."""
  predict = functools.partial(predict_step, WORK, platform, "data", **options)
  methods = "gather", "two_phase"
  every = [rules_of(choice) for choice in every_choice(3, 3)]
  find = lambda codec: min(predict(codec, method=m).total_s for m in methods)
  return np.array(list(map(find, every)))


def shortest(steps_s, errors, limit):
  """Seconds of the shortest step within a budget of squared errors."""
  lost = errors[np.arange(3), every_choice(3, 3)].sum(1)
  return steps_s[lost <= limit].min()


@pytest.mark.parametrize(
  ("workers", "gbit"), [(2, 0.1), (2, 300), (8, 0.1), (8, 10)]
)
def test_no_choice_within_the_budget_is_predicted_to_be_faster(workers, gbit):
  platform, grads = cluster(workers, gbit), gradients()
  found, steps_s = measure_errors(PARAMS, THREE, grads), list_steps(platform)
  for budget in (0.0, 0.004, 0.1):
    plan = advise(platform, accuracy_budget=budget, gradients=grads)
    best = shortest(steps_s, *found.squared_limits(budget))
    assert plan.step.total_s == pytest.approx(best, rel=1e-8)
    assert plan.error <= budget * (1 + 1e-9)
    assert plan.step.total_s <= plan.uncompressed.total_s


@pytest.mark.parametrize(
  ("gbit", "options"),
  [(0.1, {"overlap": False}), (0.1, {"bucket_bytes": 1}), (100, {})],
)
def test_steps_of_any_overlap_and_buckets_are_the_shortest(gbit, options):
  platform, bounds = cluster(8, gbit), bound_errors(PARAMS, THREE)
  plan = advise(platform, **options)
  steps_s = list_steps(platform, **options)
  best = shortest(steps_s, *bounds.squared_limits(0.1))
  assert plan.step.total_s == pytest.approx(best, rel=1e-8)


def test_no_single_codec_that_fits_is_faster():
  plan = planner.advise(WORK, PARAMS, (), SLOW)
  bounds = bound_errors(PARAMS, plan.problem.candidates)
  assert list(plan.uniform_s) == [codecs.identity(), *planner.CANDIDATES]
  for i, (codec, total_s) in enumerate(plan.uniform_s.items()):
    step = predict_step(WORK, SLOW, "data", codec)
    assert total_s <= step.total_s * (1 + 1e-9)
    if bounds.total_error(np.full(3, i)) <= 0.1:
      assert plan.step.total_s <= total_s * (1 + 1e-9)


def test_bits_differ_between_tensors_if_the_budget_is_between():
  bits = [codecs.uniform(bits=b) for b in (8, 6, 4)]
  grads = gradients()
  plans = [
    advise(SLOW, candidates=bits, gradients=grads, accuracy_budget=budget)
    for budget in (0.01, 0.06, 0.2)
  ]
  times = [plan.step.total_s for plan in plans]
  assert times == sorted(times, reverse=True)
  assert len({choice.codec for choice in plans[1].choices}) > 1
  # Several codecs use the part of the budget that one codec for all leaves.
  fits = [
    plans[1].uniform_s[c]
    for i, c in enumerate((codecs.identity(), *bits))
    if measure_errors(PARAMS, [c], grads).total_error(np.zeros(3, int)) <= 0.06
  ]
  assert plans[1].step.total_s < min(fits)


def test_nothing_is_compressed_where_no_codec_pays_or_fits():
  plan = advise(FAST)
  assert not plan.is_compressed
  assert plan.codec == codecs.identity() and plan.method is None
  assert plan.step == plan.uncompressed
  assert plan.reason.startswith("Do not compress: the step takes")
  for choice in plan.choices:
    assert choice.method == "sum" and choice.error == 0
    assert "longer" in choice.reason
  kept = advise(SLOW, accuracy_budget=0.0)
  assert "does not fit in the budget" in kept.choices[1].reason
  for plan, why in (
    (kept, "no codec's error fits"),
    (advise(SLOW, candidates=[]), "no codec's error fits"),
    (advise(cluster(1)), "one worker"),
  ):
    assert not plan.is_compressed
    assert plan.reason.startswith("Do not compress") and why in plan.reason


def traced_ledger(plan, workers):
  """Ledger of the traced exchange of a plan."""
  mesh = AbstractMesh((workers,), ("data",), axis_types=(AxisType.Auto,))
  tx = jaxmotion.exchange("data", plan.codec, method=plan.method)

  def exchange():
    grads = jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), PARAMS)
    grads = to_varying(grads, "data")
    return tx.update(grads, tx.init(grads))[0]

  program = jax.shard_map(exchange, mesh=mesh, in_specs=(), out_specs=P())
  return wire.step_bytes(program)


@pytest.mark.parametrize(
  ("workers", "gbit"), [(2, 0.1), (2, 100), (4, 0.1), (8, 10)]
)
def test_an_exchange_sends_the_bytes_that_its_plan_predicts(workers, gbit):
  options = dict(candidates=[*THREE[1:], INT4], gradients=gradients())
  plan = advise(cluster(workers, gbit), **options)
  assert traced_ledger(plan, workers).total_bytes == plan.step.wire_bytes


def test_hosts_of_several_devices_exchange_shards():
  platform = perfmodel.builtin_platform("h100_cluster").resize(host=4)
  axes = jaxmotion.HostAxes("host", "device")
  plan = advise(platform, mesh_axis=axes)
  step = predict_step(WORK, platform, axes, plan.codec, method=plan.method)
  assert plan.step == step
  for axis, nbytes in step.axis_bytes.items():
    sent = sum(c.axis_bytes[axis] for c in plan.choices)
    assert sent == pytest.approx(nbytes)


def test_bytes_between_hosts_are_not_added_to_those_within_a_host():
  slow = dataclasses.replace(cluster(4, 0.1).axes[0], name="host")
  platform = perfmodel.builtin_platform("h100_cluster")
  axes = slow, platform.axis("device")
  platform = dataclasses.replace(platform, axes=axes, sources={})
  plan = advise(platform, mesh_axis=jaxmotion.HostAxes("host", "device"))
  ledger = perfmodel.exchange_ledger(
    PARAMS, platform, jaxmotion.HostAxes("host", "device"), plan.codec
  )
  assert plan.is_compressed
  for (axis,), nbytes in ledger.per_axis().items():
    said = f"{nbytes / 1e3:.3g} kB over '{axis}' instead of "
    assert said in plan.reason
  assert plan.reason.index("over 'host'") < plan.reason.index("over 'device'")
  header, text = "over 'host'  over 'device'", str(plan)
  assert re.search("^tensor .*" + header, text, re.M)
  assert re.search("^algorithm .*" + header, text, re.M)


def test_a_function_gives_the_plan_of_its_traced_step():
  traced = advise(SLOW)
  given = loss, PARAMS, (BATCH,), SLOW
  plan = planner.advise(*given, candidates=THREE[1:], optimizer=None)
  assert plan.step == traced.step and plan.choices == traced.choices
  # The optimizer is part of the step.
  slow = planner.advise(*given, candidates=(), optimizer=optax.adam(1e-3))
  assert slow.step.update_s > traced.step.update_s


W = jax.ShapeDtypeStruct((4, 4), "float32")
HALF_W, HALF_X = (
  jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, "bfloat16"), tree)
  for tree in (PARAMS, BATCH)
)
TABLE = {"table": jax.ShapeDtypeStruct((3,), "int32")}
AXES = jaxmotion.HostAxes("data", "device")
ALONE = dataclasses.replace(SLOW, axes=(), sources={})
H100 = perfmodel.builtin_platform("h100_cluster")


@pytest.mark.parametrize(
  ("platform", "options", "message"),
  [
    (SLOW, {"mesh_axis": AXES}, "must be one of 'data', got 'device'"),
    (ALONE, {}, "`mesh_axis` must be one of , got None"),
    (H100, {}, "`mesh_axis` must be one of 'host', 'device', got"),
    (
      SLOW,
      {"candidates": [codecs.buckets(codecs.sign())]},
      r"`candidates\[0\]` must be a codec of arrays, got buckets",
    ),
    (SLOW, {"candidates": [codecs.ternary()]}, "`gradients` must be given"),
  ],
)
def test_options_that_do_not_fit_are_named(platform, options, message):
  with pytest.raises((TypeError, ValueError), match=message):
    advise(platform, **options)


@pytest.mark.parametrize(
  ("args", "message"),
  [
    ((loss, {}, (BATCH,)), "`params` must hold at least one"),
    (
      (lambda p, x: x.sum(), TABLE, (W,)),
      r"`params/table` must .*got int32\[3\]",
    ),
    ((loss, HALF_W, (HALF_X,)), "must have a rate for 'bfloat16'"),
    ((WORK, PARAMS, (BATCH,)), "`batch` must be empty"),
    ((WORK, W, ()), "`params` must be those of the traced"),
  ],
)
def test_arguments_that_do_not_fit_are_named(args, message):
  with pytest.raises((TypeError, ValueError), match=message):
    planner.advise(*args, SLOW)
