"""`advise` finds the shortest step within the budget, and explains it."""

import dataclasses

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


def shortest(platform, errors, limit, **options):
  """Seconds of the shortest step of all choices, by the performance model."""
  every = every_choice(3, 3)
  lost = errors[np.arange(3), every].sum(1)
  return min(
    predict_step(
      WORK, platform, "data", rules_of(choice), method=method, **options
    ).total_s
    for choice in every[lost <= limit]
    for method in ("gather", "two_phase")
  )


@pytest.mark.parametrize("workers", [2, 8])
@pytest.mark.parametrize("gbit", [0.1, 10, 300])
def test_no_choice_within_the_budget_is_predicted_to_be_faster(workers, gbit):
  platform = cluster(workers, gbit)
  grads = gradients()
  found = measure_errors(PARAMS, THREE, grads)
  for budget in (0.0, 0.004, 0.1):
    plan = advise(platform, accuracy_budget=budget, gradients=grads)
    errors, limit = found.squared_limits(budget)
    best = shortest(platform, errors, limit)
    assert plan.step.total_s == pytest.approx(best, rel=1e-8)
    assert plan.error <= budget * (1 + 1e-9)
    assert plan.step.total_s <= plan.uncompressed.total_s


@pytest.mark.parametrize("options", [{"overlap": False}, {"bucket_bytes": 1}])
def test_steps_of_any_overlap_and_buckets_are_the_shortest(options):
  bounds = bound_errors(PARAMS, THREE)
  for gbit in (0.1, 100):
    platform = cluster(8, gbit)
    plan = advise(platform, **options)
    best = shortest(platform, *bounds.squared_limits(0.1), **options)
    assert plan.step.total_s == pytest.approx(best, rel=1e-8)


@pytest.mark.parametrize("platform", [SLOW, FAST], ids=["slow", "fast"])
def test_no_single_codec_that_fits_is_faster(platform):
  plan = planner.advise(WORK, PARAMS, (), platform)
  bounds = bound_errors(PARAMS, plan.problem.candidates)
  assert list(plan.uniform_s) == [codecs.identity(), *planner.CANDIDATES]
  for i, (codec, total_s) in enumerate(plan.uniform_s.items()):
    step = predict_step(WORK, platform, "data", codec)
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


def test_nothing_is_compressed_where_no_codec_pays():
  plan = advise(FAST)
  assert not plan.is_compressed
  assert plan.codec == codecs.identity() and plan.method is None
  assert plan.step == plan.uncompressed
  assert plan.reason.startswith("Do not compress: the step takes")
  for choice in plan.choices:
    assert choice.method == "sum" and choice.error == 0
    assert "longer" in choice.reason


def test_nothing_is_compressed_without_budget_candidates_or_workers():
  for plan in (
    advise(SLOW, accuracy_budget=0.0),
    advise(SLOW, candidates=[]),
    advise(cluster(1)),
  ):
    assert not plan.is_compressed
    assert plan.reason.startswith("Do not compress")
  kept = advise(SLOW, accuracy_budget=0.0)
  assert "no codec's error fits" in kept.reason
  assert "does not fit in the budget" in kept.choices[1].reason
  assert "one worker" in advise(cluster(1)).reason


def test_a_plan_prints_every_choice_and_reason():
  plan = advise(SLOW)
  assert plan.is_compressed and plan.reason.startswith("Compress 3 of 3")
  text = str(plan)
  for choice in plan.choices:
    assert choice.path in text and choice.reason in text
    assert choice.reason.startswith("Saves ") and choice.reason.endswith(".")
  assert [choice.path for choice in plan.choices] == sorted(PARAMS)
  sent = sum(choice.wire_bytes for choice in plan.choices)
  assert sent == pytest.approx(plan.step.wire_bytes)


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


@pytest.mark.parametrize("workers", [2, 4, 8])
@pytest.mark.parametrize("gbit", [0.1, 10, 100])
def test_an_exchange_sends_the_bytes_that_its_plan_predicts(workers, gbit):
  plan = advise(
    cluster(workers, gbit),
    candidates=[*THREE[1:], INT4],
    gradients=gradients(),
  )
  assert traced_ledger(plan, workers).total_bytes == plan.step.wire_bytes


def test_a_plan_trains():
  plan = advise(cluster(2, 0.1), candidates=[INT4], gradients=gradients())
  assert plan.codec != codecs.identity()
  mesh = jax.make_mesh(
    (2,), ("data",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2]
  )
  tx = optax.chain(
    jaxmotion.exchange("data", plan.codec, method=plan.method), optax.sgd(0.1)
  )
  init, step = jaxmotion.make_train_step(loss, tx, mesh)
  state = init(jax.tree.map(lambda a: jnp.full(a.shape, 0.01, a.dtype), PARAMS))
  batch = jnp.ones((8, 96))
  state, first = step(state, batch)
  *_, second = step(state, batch)
  assert second < first


def test_hosts_of_several_devices_exchange_shards():
  platform = perfmodel.builtin_platform("h100_cluster").resize(host=4)
  axes = jaxmotion.HostAxes("host", "device")
  plan = advise(platform, mesh_axis=axes)
  step = predict_step(WORK, platform, axes, plan.codec, method=plan.method)
  assert plan.step == step
  assert sum(c.wire_bytes for c in plan.choices) == pytest.approx(
    step.wire_bytes
  )


def test_a_function_gives_the_plan_of_its_traced_step():
  traced = advise(SLOW)
  plan = planner.advise(
    loss, PARAMS, (BATCH,), SLOW, candidates=THREE[1:], optimizer=None
  )
  assert plan.step == traced.step and plan.choices == traced.choices


def test_the_optimizer_is_part_of_the_step():
  slow = planner.advise(
    loss, PARAMS, (BATCH,), SLOW, candidates=(), optimizer=optax.adam(1e-3)
  )
  assert slow.step.update_s > advise(SLOW).step.update_s


def spin(w, x):
  trips = jax.lax.stop_gradient(x.sum())
  return w.sum() + jax.lax.while_loop(lambda t: t < 9, lambda t: t + 1, trips)


W = jax.ShapeDtypeStruct((4, 4), "float32")


def test_a_while_loop_without_trips_is_named():
  with pytest.raises(ValueError, match="`while_trips` must give.*lambda"):
    planner.advise(spin, W, (BATCH,), SLOW)
  traced = perfmodel.trace_step(spin, W, (BATCH,), while_trips=3)
  plan = planner.advise(traced, W, (), SLOW, candidates=())
  assert plan.step.total_s > 0


@pytest.mark.parametrize(
  ("options", "error", "message"),
  [
    (
      {"mesh_axis": "model"},
      ValueError,
      "`mesh_axis` must be one of 'data', got 'mod",
    ),
    (
      {"mesh_axis": jaxmotion.HostAxes("data", "device")},
      ValueError,
      "`mesh_axis` must be one of 'data', got 'dev",
    ),
    ({"accuracy_budget": 1.5}, ValueError, r"must be a number in \[0, 1\]"),
    ({"accuracy_budget": -0.1}, ValueError, r"\[0, 1\], got -0.1"),
    ({"accuracy_budget": float("nan")}, ValueError, "got nan"),
    ({"accuracy_budget": "0.1"}, TypeError, "got '0.1'"),
    (
      {"candidates": ["int8"]},
      TypeError,
      r"`candidates\[0\]` must be a codec of arrays",
    ),
    (
      {"candidates": [codecs.buckets(codecs.sign())]},
      TypeError,
      r"`candidates\[0\]` must be a codec of arrays, got buckets",
    ),
    ({"candidates": [codecs.ternary()]}, ValueError, "`gradients` must be"),
    ({"bucket_bytes": 0}, ValueError, "`bucket_bytes` must be"),
  ],
)
def test_invalid_arguments_are_named(options, error, message):
  with pytest.raises(error, match=message):
    advise(SLOW, **options)


def test_missing_or_mismatched_arguments_are_named():
  with pytest.raises(ValueError, match="`params` must hold at least one"):
    planner.advise(loss, {}, (BATCH,), SLOW)
  table = {"table": jax.ShapeDtypeStruct((3,), "int32")}
  with pytest.raises(TypeError, match=r"`params/table` must .*got int32\[3\]"):
    planner.advise(lambda p, x: x.sum(), table, (W,), SLOW)
  with pytest.raises(TypeError, match="`platform` must be.*'ethernet'"):
    planner.advise(WORK, PARAMS, (), "ethernet")
  with pytest.raises(TypeError, match="`batch` must be a tuple.*got a Shape"):
    planner.advise(loss, PARAMS, BATCH, SLOW)
  with pytest.raises(ValueError, match="`mesh_axis` must be one of , got None"):
    advise(dataclasses.replace(SLOW, axes=(), sources={}))
  with pytest.raises(
    ValueError, match="`mesh_axis` must be one of 'host', 'dev"
  ):
    advise(perfmodel.builtin_platform("h100_cluster"))
  half = jax.tree.map(
    lambda a: jax.ShapeDtypeStruct(a.shape, "bfloat16"), (PARAMS, BATCH)
  )
  with pytest.raises(ValueError, match="must have a rate for 'bfloat16'"):
    planner.advise(loss, half[0], (half[1],), SLOW)
  with pytest.raises(ValueError, match="`batch` must be empty"):
    planner.advise(WORK, PARAMS, (BATCH,), SLOW)
  with pytest.raises(ValueError, match="`params` must be those of the traced"):
    planner.advise(WORK, W, (), SLOW)
