"""Other algorithms beside a plan, and why some are not offered."""

import dataclasses
import functools
import inspect
import re

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import AbstractMesh, AxisType

import jaxmotion
from jaxmotion import perfmodel, planner, presets, transforms, wire
from jaxmotion.perfmodel import builtin_platform
from jaxmotion.planner.exchange import _algorithms
from tests.meshes import mesh_of

MATRIX = jax.ShapeDtypeStruct((512, 512), "float32")
PARAMS = {"a": MATRIX, "b": MATRIX}
VECTORS = [jax.ShapeDtypeStruct((300,), "float32")] * 4
X = jax.ShapeDtypeStruct((32, 512), "float32")
ETHERNET = builtin_platform("ethernet_1gbit")


def matrix_loss(params, x):
  return jnp.mean(jnp.tanh(x @ params["a"] @ params["b"]) ** 2)


def vector_loss(params):
  return sum(jnp.sum(p**2) for p in params)


def compare(platform, rows=32, **options):
  x = jax.ShapeDtypeStruct((rows, 512), "float32")
  return planner.advise(matrix_loss, PARAMS, (x,), platform, **options)


@functools.cache
def plan_on_ethernet():
  return compare(ETHERNET)


def find(table, name):
  (found,) = [choice for choice in table if name in choice.name]
  return found


def test_the_fastest_is_first_what_is_refused_last_and_hosts_are_known():
  table = plan_on_ethernet().algorithms
  seconds = [choice.step_s for choice in table if choice.is_offered]
  assert seconds == sorted(seconds) and len(seconds) > 5
  offered = [choice.is_offered for choice in table]
  assert offered == sorted(offered, reverse=True)
  names = [
    n for n, f in vars(presets).items() if inspect.isfunction(f) and n[0] != "_"
  ]
  assert names and all(find(table, f"presets.{name}(") for name in names)
  for name in ("dgc", "ef21_sgdm", "onebit_adam", "muloco", "sdp4bit"):
    assert find(table, name).is_offered
  axes = jaxmotion.HostAxes("host", "device")
  platform = builtin_platform("h100_cluster")
  plan = compare(platform, mesh_axis=axes, candidates=())
  for name in ("lion", "sdp4bit", "diloco", "streaming_diloco", "muloco"):
    assert find(plan.algorithms, f"presets.{name}").is_offered


def test_an_outer_optimizer_is_offered_inside_local_updates():
  table = plan_on_ethernet().algorithms
  choice = find(table, "presets.sparse_loco(")
  assert choice.is_offered and choice.name.startswith("local_updates(..., ")
  rarer = find(table, "local_updates(..., every=")
  every = re.search(r"every=(\d+)", choice.name)[1]
  assert f"apart for {every} steps" in choice.note
  assert choice.axis_bytes["data"] < rarer.axis_bytes["data"]


def test_a_plan_prints_every_choice_and_reason():
  plan = plan_on_ethernet()
  assert plan.is_compressed and plan.reason.startswith("Compress 2 of 2")
  text = str(plan)
  assert "presets.lion(" in text
  for choice in plan.choices:
    assert choice.path in text and choice.reason in text
    assert choice.reason.startswith("Saves ") and choice.reason.endswith(".")
  assert [choice.path for choice in plan.choices] == sorted(PARAMS)
  sent = sum(choice.axis_bytes["data"] for choice in plan.choices)
  assert sent == pytest.approx(plan.step.wire_bytes)


def test_a_faster_algorithm_is_named_where_it_pays_and_fits(monkeypatch):
  plan = plan_on_ethernet()
  local = find(plan.algorithms, "local_updates(..., every=")
  every = int(local.name.rpartition("=")[2].rstrip(")"))
  assert local.axis_bytes == {"data": plan.step.wire_bytes / every}
  best = plan.alternative
  assert best == plan.algorithms[0] and best.step_s < 0.9 * plan.step.total_s
  assert f"\n`{best.name}` would take " in str(plan)

  def plan_on(rows, **changes):
    platform = dataclasses.replace(ETHERNET, **changes, sources={})
    plan = compare(platform, rows)
    local = _algorithms.weigh_period(plan.problem, plan.step)
    table = _algorithms.AlgorithmTable([local])
    monkeypatch.setattr(_algorithms, "weigh_algorithms", lambda *_: table)
    assert plan.alternative is None and "` would take" not in str(plan)
    return plan

  # What is fast already gains nothing from being rare.
  (axis,) = ETHERNET.axes
  rate = perfmodel.gbyte_per_s(1000)
  fast = dataclasses.replace(axis.link, latency_s=0.0, rate=rate)
  plan_on(1 << 15, axes=(dataclasses.replace(axis, link=fast),))
  # It keeps an anchor and a momentum, which do not fit here.
  small = dataclasses.replace(ETHERNET.device, memory_bytes=4e6)
  plan = plan_on(32, device=small)
  assert "of memory" in refusal(plan, "local_updates(..., every=")
  assert "not offered" in str(plan.algorithms)


def test_a_plan_that_does_not_fit_says_what_does():
  assert "does not fit" not in str(plan_on_ethernet())
  tx = optax.adam(1e-3)
  needed = compare(ETHERNET, optimizer=tx).step.memory_bytes
  for memory_bytes, some_fit in ((1e6, False), (0.99 * needed, True)):
    small = dataclasses.replace(ETHERNET.device, memory_bytes=memory_bytes)
    platform = dataclasses.replace(ETHERNET, device=small, sources={})
    plan = compare(platform, optimizer=tx)
    assert "It does not fit: it needs" in str(plan)
    assert not find(plan.algorithms, "exchange('data', plan.codec)").is_offered
    offered = [c.name for c in plan.algorithms if c.is_offered]
    assert bool(offered) == some_fit
    assert (plan.alternative is not None) == some_fit
    best = (
      f"The fastest that fits is `{offered[0]}`" if some_fit else "None fits"
    )
    assert f"{best}." in str(plan)


def test_a_preset_sends_what_its_program_asks_for():
  """Predicted bytes of the last phase are those of the traced update."""
  mesh = AbstractMesh((8,), ("data",), axis_types=(AxisType.Auto,))
  tx = presets.power_sgd("data", start=0)

  def update(grads):
    state = tx.init(grads)
    return tx.update(grads, state)[0]

  traced = wire.step_bytes(
    jax.shard_map(
      update,
      mesh=mesh,
      in_specs=jax.P("data"),
      out_specs=jax.P("data"),
      check_vma=False,
    ),
    dict.fromkeys(PARAMS, jax.ShapeDtypeStruct((8 * 512, 512), "float32")),
  )
  found = find(plan_on_ethernet().algorithms, "power_sgd")
  sent = {"data": pytest.approx(traced.total_bytes, rel=1e-6)}
  assert found.axis_bytes == sent


def refusal(plan, name):
  """Says why a plan does not offer an algorithm."""
  found = find(plan.algorithms, name)
  assert not found.is_offered and found.axis_bytes == {}
  return found.note


def model_loss(params, ids):
  def layer(x, w):
    return jnp.tanh(x @ w), None

  x, _ = jax.lax.scan(layer, params["table"][ids], params["layers"])
  return jnp.mean(x @ params["table"].T if "tied" in params else x)


def plan_model(optimizer, **more):
  params = {
    "table": jax.ShapeDtypeStruct((1000, 64), "float32"),
    "layers": jax.ShapeDtypeStruct((3, 64, 64), "float32"),
    **more,
  }
  ids = jax.ShapeDtypeStruct((8,), "int32")
  options = dict(optimizer=optimizer, candidates=())
  return planner.advise(model_loss, params, (ids,), ETHERNET, **options)


def test_what_the_loss_the_optimizer_or_vectors_break_is_not_offered():
  norm = optax.clip_by_global_norm(1.0)
  plan = plan_model(optax.chain(norm, optax.adam(0.1)))
  for name in ("dgc", "ef21_sgdm"):
    assert "`optimizer` keeps moments" in refusal(plan, name)
  for name in ("onebit_adam", "muloco"):
    assert "looks up rows of `table`" in refusal(plan, name)
  assert "`layers` apart, a stack" in refusal(plan, "power_sgd")
  for name in ("sharded('data'", "fully_sharded", "sdp4bit"):
    assert "optimizer of single elements" in refusal(plan, name)
  assert "gather_block" in refusal(plan, "zeropp")
  assert find(plan.algorithms, "lion").is_offered
  # A table that is also read as a whole has a gradient everywhere.
  plan = plan_model(optax.sgd(0.1), tied=jax.ShapeDtypeStruct((1,), "float32"))
  pricing = _algorithms._Pricing(plan.problem, plan.uncompressed)
  for assumption in ("no_moments", "no_lookups", "elementwise"):
    assert not pricing._find_break(assumption)
  plan = planner.advise(vector_loss, VECTORS, (), ETHERNET, candidates=())
  assert "no fewer bytes" in refusal(plan, "power_sgd")
  assert "`params` has none" in refusal(plan, "muloco")


def test_sharded_bytes_of_all_leaves_are_those_of_a_traced_update():
  """Those of one leaf of each shape are multiplied, which saves the trace."""
  params = [MATRIX, *VECTORS, MATRIX]
  loss = lambda params, x: jnp.mean(x @ params[0] @ params[-1])
  plan = planner.advise(loss, params, (X,), ETHERNET, candidates=())
  tx = presets.sdp4bit("data", optax.sgd(0.1))
  pricing = _algorithms._Pricing(plan.problem, plan.uncompressed)
  _, found = pricing._trace_distinct(tx)
  _, ledger = pricing._trace_moves(tx, params)
  assert found.total_bytes == pytest.approx(ledger.total_bytes)


def test_fully_sharded_bytes_are_those_of_a_traced_step():
  plan = compare(ETHERNET.resize(data=4), rows=8, candidates=())
  found = find(plan.algorithms, "fully_sharded")
  dense = transforms.gather_block(lambda w, x: jnp.tanh(x @ w))

  def loss(params, x):
    return jnp.mean(dense(params["b"], dense(params["a"], x)) ** 2)

  scheme = jaxmotion.fully_sharded(optax.sgd(0.1))
  init, step = jaxmotion.make_train_step(loss, scheme, mesh_of(4))
  state = init(jax.tree.map(lambda a: jnp.zeros(a.shape), PARAMS))
  traced = wire.step_bytes(step, state, jnp.zeros((32, 512)))
  # The mean loss takes some bytes more.
  assert found.axis_bytes["data"] == pytest.approx(traced.total_bytes, abs=64)
